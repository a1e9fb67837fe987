// SPDX-License-Identifier: Apache-2.0
// Tests that need a certain machine, or somebody outside it who does something to it: tests/qemu says which and what.
// They are not part of what runs on every machine: their suites begin with "Scenario".
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "guest_support.h"
#include "tests/nvme_marked_bytes.h"

namespace tardis::nvme::testing {

// Asks whoever runs the guest for something, at the port that TARDIS_GUEST_HOST names. What was answered after "ok",
// or a failed test.
inline std::string ask_host(const std::string& line, int seconds = 30) {
  const char* const path = std::getenv("TARDIS_GUEST_HOST");
  const UniqueFd port(::open(path != nullptr ? path : "", O_RDWR | O_NOCTTY | O_CLOEXEC));
  const std::string sent = line + "\n";
  if (!port || ::write(port.get(), sent.data(), sent.size()) != static_cast<ssize_t>(sent.size())) {
    ADD_FAILURE() << "nobody to ask for '" << line << "': " << std::strerror(errno);
    return {};
  }
  std::string answer;
  while (!answer.ends_with('\n')) {
    pollfd readable{port.get(), POLLIN, 0};
    char byte = 0;
    if (::poll(&readable, 1, seconds * 1000) != 1 || ::read(port.get(), &byte, 1) != 1) {
      ADD_FAILURE() << "no answer to '" << line << "' within " << seconds << " s";
      return {};
    }
    if (byte != '\r') answer += byte;
  }
  answer.pop_back();
  EXPECT_TRUE(answer.starts_with("ok")) << line << ": " << answer;
  return answer.size() > 3 ? answer.substr(3) : std::string();
}

inline std::string setting(const char* name) {
  const char* const text = std::getenv(name);
  if (text == nullptr) ADD_FAILURE() << name << " is not set";
  return text != nullptr ? text : "";
}

struct Timed {
  int error;
  double ms;
};
// As a row of docs/nvme-faults.md.
inline Timed timed(const char* fault, const std::function<int()>& request) {
  const std::uint64_t start = monotonic_ns();
  const int error = request();
  const Timed result{error, static_cast<double>(monotonic_ns() - start) / 1e6};
  std::printf("[ FAULT    ] %-52s | %-10s | %7.1f ms\n", fault, error == 0 ? "success" : ::strerrorname_np(error),
              result.ms);
  return result;
}

}  // namespace tardis::nvme::testing
