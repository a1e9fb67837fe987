// SPDX-License-Identifier: Apache-2.0
// The direct landing of a session: a copy engine, attached to its controller and tested, and the regions that are its
// memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "gio/grant.h"
#include "nvme/nvme_namespace.h"
#include "nvme/soft/controller.h"
#include "nvme/soft/copy_engine.h"

namespace tardis::gio {

// Goes after the grant and the driver, and before the controller.
class SessionDirect {
 public:
  SessionDirect(nvme::DmaSpace& space, nvme::SoftController& controller, nvme::Medium& medium)
      : space_(space), controller_(controller), medium_(medium) {}
  ~SessionDirect() { stop(); }
  SessionDirect(const SessionDirect&) = delete;
  SessionDirect& operator=(const SessionDirect&) = delete;

  // Pins the medium's bytes if they lie in memory, attaches the engine, and has the self-test write a pattern from the
  // engine's memory to the last 128 KiB of the namespace, and back; what was there is put back. (Of one that can only
  // be read: 128 KiB are read both ways.) On an error all is as before, and report() says why.
  Status start(std::unique_ptr<nvme::CopyEngine> engine, void* lists, Grant& grant, nvme::NvmeNamespace& disk);
  Status add(Grant& grant, void* base, std::size_t bytes);
  Status remove(Grant& grant, void* base);
  // To a new grant, after the controller was lost; the regions again.
  Status connect(Grant& grant);

  std::string report() const;

 private:
  struct Registered {
    void* base;
    std::size_t bytes;
  };
  Status begin(void* lists, Grant& grant, nvme::NvmeNamespace& disk);
  Status test(nvme::NvmeNamespace& disk);
  void stop();

  nvme::DmaSpace& space_;
  nvme::SoftController& controller_;
  nvme::Medium& medium_;
  std::unique_ptr<nvme::CopyEngine> engine_;
  std::optional<nvme::EngineMemory> memory_;
  bool pinned_ = false;
  void* lists_ = nullptr;  // null: not started
  std::vector<Registered> regions_;
  std::string refused_;  // why it is not direct
};

}  // namespace tardis::gio
