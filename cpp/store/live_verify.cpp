// SPDX-License-Identifier: Apache-2.0
#include "store/live_verify.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

#include "base/aligned_buffer.h"
#include "store/digest.h"
#include "store/files.h"
#include "store/folder.h"
#include "store/list.h"

namespace tardis {
namespace {

constexpr std::size_t kMaxProblems = 1000;
// Longer than a set takes from its first byte to its last: a page that was being stored is whole at the second look.
constexpr auto kSecondLook = std::chrono::milliseconds(500);

enum class Look { kWhole, kDifferent, kUnreadable };

struct Page {
  std::uint32_t slot;
  SlotHeader header;
  int error = 0;
};

class LiveVerification {
 public:
  using Progress = std::function<bool(std::uint64_t, std::uint64_t)>;
  LiveVerification(StoreFiles files, const Progress& progress) : files_(std::move(files)), progress_(progress) {}

  Result<VerifyResult> run();

 private:
  bool check_segment(SegmentName name);  // false: asked to stop
  void second_look(const HeaderTable& table, std::vector<Page>& failed, const std::vector<std::uint32_t>& bad_headers);
  Look read_page(const HeaderTable& table, Page& page);
  void fault(std::uint64_t& counter, const HeaderTable& table, std::uint32_t slot, const std::string& what);
  void problem(std::string text) {
    if (result_.problems.size() < kMaxProblems) result_.problems.push_back(std::move(text));
  }

  StoreFiles files_;
  const Progress& progress_;
  VerifyResult result_;
  AlignedBuffer memory_;
  std::uint64_t done_ = 0, total_ = 0;
};

void LiveVerification::fault(std::uint64_t& counter, const HeaderTable& table, std::uint32_t slot,
                             const std::string& what) {
  // The dirty flag is durable before a segment's first write, so a superblock that was clean and still is the same says
  // that nobody wrote in between.
  const auto now = read_header_table(table.name, files_.folder);
  const bool written = (table.superblock.flags & (kSegmentDirty | kSegmentSuspect)) != 0 || !now ||
                       now->superblock.crc != table.superblock.crc;
  if (written) {
    ++result_.report.torn;
    return;
  }
  ++counter;
  problem(table.path + ": slot " + std::to_string(slot) + what);
}

// Opens the file if it is not yet. 0 or an errno.
int read_range(UniqueFd& fd, const std::string& file, std::uint64_t offset, std::byte* to, std::uint64_t bytes) {
  if (!fd) {
    auto opened = open_regular_file(file);
    if (!opened) return opened.error().os_error != 0 ? opened.error().os_error : EINVAL;
    fd = std::move(*opened);
  }
  const auto forget = [&] {
    ::posix_fadvise(fd.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
  };
  // What this reads is read once: it must not push the rest out of the page cache, nor come from there a second time.
  forget();
  int error = 0;
  for (std::uint64_t at = 0; error == 0 && at < bytes;) {
    const ssize_t got = ::pread(fd.get(), to + at, bytes - at, static_cast<off_t>(offset + at));
    if (got > 0) {
      at += static_cast<std::uint64_t>(got);
    } else if (got == 0 || errno != EINTR) {
      error = got == 0 ? ENODATA : errno;
    }
  }
  forget();
  return error;
}

Look LiveVerification::read_page(const HeaderTable& table, Page& page) {
  const ObjectGeometry g = ObjectGeometry::of(page.header);
  if (memory_.size() < g.stored_bytes()) memory_ = AlignedBuffer(g.stored_bytes());
  const std::uint64_t offset = SegmentGeometry::of(table.superblock).slot_offset(page.slot);
  page.error = 0;
  std::vector<UniqueFd> fds(std::max<std::size_t>(1, table.files.size()));
  if (table.files.empty()) {
    page.error = read_range(fds[0], table.path, offset, memory_.data(), g.stored_bytes());
  } else {
    std::byte* to = memory_.data();
    table.stripe_map().pieces(offset, g.stored_bytes(), [&](std::uint32_t file, std::uint64_t at, std::uint64_t bytes) {
      if (page.error == 0) page.error = read_range(fds[file], table.files[file], at, to, bytes);
      to += bytes;
    });
  }
  if (page.error != 0) return Look::kUnreadable;
  std::vector<std::uint64_t> digests(g.chunks());
  for (std::uint32_t part = 0; part < g.parts; ++part) {
    const auto piece = reinterpret_cast<std::uint64_t>(memory_.data() + part * g.part_stride);
    digest_chunks(g, &piece, 0, g.chunks_per_part, digests.data() + std::size_t{part} * g.chunks_per_part);
  }
  return digest_root(g, digests.data()) == page.header.root_digest ? Look::kWhole : Look::kDifferent;
}

void LiveVerification::second_look(const HeaderTable& table, std::vector<Page>& failed,
                                   const std::vector<std::uint32_t>& bad_headers) {
  if (failed.empty() && bad_headers.empty()) return;
  std::this_thread::sleep_for(kSecondLook);
  const SegmentFacts facts = table.facts(files_.folder.superblock());
  for (const std::uint32_t slot : bad_headers) {
    const auto now = read_header(table, slot);
    if (now && judge(*now, slot, facts) != Belief::kBad) continue;
    fault(result_.report.bad_headers, table, slot, ": the header fails its checks");
  }
  for (Page& page : failed) {
    const auto unchanged = [&] {
      const auto now = read_header(table, page.slot);
      return now && now->generation == page.header.generation && now->crc == page.header.crc;
    };
    if (!unchanged()) continue;
    const Look look = read_page(table, page);
    if (look == Look::kWhole || !unchanged()) continue;
    const std::string key = " (key " + hex(page.header.key.data(), page.header.key.size()) + "): ";
    if (look == Look::kDifferent) {
      fault(result_.report.bad_payloads, table, page.slot, key + "the payload fails its digest");
    } else {  // no write in progress makes a medium unreadable
      ++result_.report.bad_payloads;
      problem(table.path + ": slot " + std::to_string(page.slot) + key + errno_error(page.error, "reading it").message);
    }
  }
}

bool LiveVerification::check_segment(SegmentName name) {
  tardis_verify_report& report = result_.report;
  const auto table = read_header_table(name, files_.folder);
  if (!table) {
    if (table.error().code == Code::kNotFound) return true;
    ++report.unreadable_segments;
    problem(table.error().message);
    return true;
  }
  ++report.segments;
  report.slots += table->headers.size();
  const SegmentFacts facts = table->facts(files_.folder.superblock());
  std::vector<Page> failed;
  std::vector<std::uint32_t> bad_headers;
  for (std::uint32_t slot = 0; slot < table->headers.size(); ++slot) {
    const SlotHeader& header = table->headers[slot];
    switch (judge(header, slot, facts)) {
      case Belief::kFree:
        ++report.free_slots;
        continue;
      case Belief::kQuarantined:
        ++report.quarantined;
        continue;
      case Belief::kBad:
        bad_headers.push_back(slot);
        continue;
      case Belief::kObject:
        break;
    }
    ++report.objects;
    report.bytes += header.payload_bytes;
    Page page{slot, header};
    if (read_page(*table, page) != Look::kWhole) failed.push_back(page);
    if (progress_ && !progress_(done_ + slot * table->superblock.slot_bytes, total_)) return false;
  }
  second_look(*table, failed, bad_headers);
  done_ += files_.folder.superblock().segment_bytes;
  return !progress_ || progress_(done_, total_);
}

Result<VerifyResult> LiveVerification::run() {
  for (const std::string& path : files_.missing) problem("not verified: " + path);
  total_ = files_.segments.size() * files_.folder.superblock().segment_bytes;
  for (const auto& [name, path] : files_.segments) {
    if (!check_segment(name)) return Error{Code::kClosed, "verification was stopped; nothing was changed"};
  }
  return std::move(result_);
}

}  // namespace

Result<VerifyResult> verify_live_store(const std::string& folder,
                                       const std::function<bool(std::uint64_t, std::uint64_t)>& progress) {
  auto files = store_files(folder);
  if (!files) return files.error();
  return LiveVerification(std::move(*files), progress).run();
}

}  // namespace tardis
