// SPDX-License-Identifier: Apache-2.0
// What a broker and its clients say to each other (docs/nvmed.md), over a Unix socket of type SOCK_SEQPACKET: a message
// is a struct. Both are of one machine, so in its byte order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/status.h"
#include "nvme/identify.h"

namespace tardis::nvme::broker {

inline constexpr std::uint32_t kMagic = 0x44'4d'56'4e;  // "NVMD"
inline constexpr std::uint16_t kVersion = 1;
inline constexpr std::size_t kMostMessageBytes = 4096;
inline constexpr std::uint32_t kNamespacesAtOnce = 32;

enum class Kind : std::uint16_t {
  // Requests, each with one reply of the same kind and number.
  kHello = 1,       // the first. Its reply has a file: what the doorbells are mapped from
  kNamespaces = 2,  // that can be used
  kOpenRange = 3,
  kCloseRange = 4,
  kOpenQueue = 5,  // its reply has a file: the memory of the queue
  kRenewQueue = 6,
  kCloseQueue = 7,
  kMapMemory = 8,  // has a file
  kUnmapMemory = 9,
  kBye = 10,  // the answer comes when the controller touches nothing of the client any more

  // Events, from the broker alone, at any time; their number is 0.
  kReset = 64,     // the controller was reset: all queues ended. kRenewQueue makes them again
  kFarewell = 65,  // the last message, and why: the controller touches nothing of the client any more
};

struct Header {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  Kind kind{};
  std::uint32_t number = 0;  // of the request, chosen by the client; not 0
  std::uint32_t bytes = 0;   // of the whole message
};
static_assert(sizeof(Header) == 16);

// What each message of the broker begins with.
struct Answer {
  Header header;
  std::int32_t code = 0;  // a tardis::Code
  std::int32_t os_error = 0;
  std::uint32_t resets = 0;        // of the controller since the broker is up, when this was said
  std::uint32_t cache_losses = 0;  // so often data may have been lost that was written and not flushed
  char text[480]{};                // of an error or an event
};
static_assert(sizeof(Answer) == 512);

struct HelloRequest {
  Header header;
  char name[48]{};  // of the client, in the broker's messages
};
static_assert(sizeof(HelloRequest) == 64);

enum class DoorbellKind : std::uint32_t {
  kMemory = 1,  // of a software controller
  kVfio = 2,    // the device's file: whoever has it can also reset the function
};

struct HelloReply {
  Answer answer;
  DoorbellKind doorbell_kind{};
  std::uint32_t doorbell_stride = 0;    // CAP.DSTRD
  std::uint64_t doorbell_offset = 0;    // of kRegDoorbells in the file: whole pages
  std::uint64_t doorbell_bytes = 0;     // from there on
  std::uint64_t most_client_bytes = 0;  // of queues and mapped memory together
  std::uint32_t most_queues = 0, most_queue_entries = 0, most_commands = 0;
  // Of the controller (identify.h).
  std::uint32_t sgl_rule = 0, sgl_blocks = 0, volatile_cache = 0;
  std::uint64_t max_transfer_bytes = 0;
  std::uint32_t retry_delay_ms[4]{};
  char serial[24]{}, model[48]{};
};
static_assert(sizeof(HelloReply) == 512 + 152);

struct NamespacesRequest {
  Header header;
  std::uint32_t first = 0;  // of the list
  std::uint32_t reserved = 0;
};
static_assert(sizeof(NamespacesRequest) == 24);

struct NamespaceEntry {
  std::uint32_t id = 0, block_bytes = 0;
  std::uint64_t blocks = 0;
  std::uint32_t atomic_blocks = 0, boundary_blocks = 0, read_only = 0, reserved = 0;
};
static_assert(sizeof(NamespaceEntry) == 32);

struct NamespacesReply {
  Answer answer;
  std::uint32_t total = 0, count = 0;  // of all; of those in this message
  NamespaceEntry entries[kNamespacesAtOnce];
};
static_assert(sizeof(NamespacesReply) == 512 + 8 + 32 * kNamespacesAtOnce);

struct OpenRangeRequest {
  Header header;
  std::uint32_t namespace_id = 0, reserved = 0;
  std::uint64_t first_block = 0;
  std::uint64_t blocks = 0;  // 0: up to the namespace's end
  char name[48]{};           // one client at a time has a name
};
static_assert(sizeof(OpenRangeRequest) == 88);

struct OpenRangeReply {
  Answer answer;
  std::uint32_t range = 0, reserved = 0;
  std::uint64_t blocks = 0;
  NamespaceEntry space;  // all of it
};
static_assert(sizeof(OpenRangeReply) == 512 + 48);

struct CloseRangeRequest {
  Header header;
  std::uint32_t range = 0, reserved = 0;
};
static_assert(sizeof(CloseRangeRequest) == 24);

struct OpenQueueRequest {
  Header header;
  std::uint32_t entries = 0;  // of both rings
  std::uint32_t reserved = 0;
  std::uint64_t more_bytes = 0;  // behind the rings, whole pages: for lists and buffers of the client
};
static_assert(sizeof(OpenQueueRequest) == 32);

struct OpenQueueReply {  // the memory lies as ExternalRings (external_queue.h) says
  Answer answer;
  std::uint32_t queue = 0;  // its identifier at the controller: doorbells and completions have it
  std::uint32_t reserved = 0;
  std::uint64_t memory_bytes = 0;  // of the file
  std::uint64_t address = 0;       // for the controller
};
static_assert(sizeof(OpenQueueReply) == 512 + 24);

struct QueueRequest {  // kRenewQueue, kCloseQueue
  Header header;
  std::uint32_t queue = 0, reserved = 0;
};
static_assert(sizeof(QueueRequest) == 24);

struct MapMemoryRequest {
  Header header;
  std::uint64_t offset = 0, bytes = 0;  // of the file, a memfd sealed against shrinking: whole pages
};
static_assert(sizeof(MapMemoryRequest) == 32);

struct MapMemoryReply {
  Answer answer;
  std::uint64_t memory = 0;  // its number
  std::uint64_t address = 0;
};
static_assert(sizeof(MapMemoryReply) == 512 + 16);

struct UnmapMemoryRequest {
  Header header;
  std::uint64_t memory = 0;
};
static_assert(sizeof(UnmapMemoryRequest) == 24);

struct ByeRequest {
  Header header;
};
static_assert(sizeof(ByeRequest) == 16);
static_assert(sizeof(NamespacesReply) <= kMostMessageBytes);

template <std::size_t N>
void put_text(char (&to)[N], const std::string& text) {
  const std::size_t bytes = std::min(text.size(), N - 1);
  std::memcpy(to, text.data(), bytes);
  std::memset(to + bytes, 0, N - bytes);
}
template <std::size_t N>
std::string get_text(const char (&from)[N]) {
  return std::string(from, ::strnlen(from, N));
}

inline NamespaceEntry entry_of(const NamespaceInfo& info) {
  return {info.id, info.block_bytes, info.blocks, info.atomic_blocks, info.boundary_blocks, info.read_only ? 1u : 0u,
          0};
}
inline NamespaceInfo info_of(const NamespaceEntry& entry) {
  return {entry.id, entry.blocks, entry.block_bytes, entry.atomic_blocks, entry.boundary_blocks, entry.read_only != 0};
}

// A message of `bytes` as a T: false if it is none.
template <class T>
bool read_message(const std::byte* from, std::size_t bytes, T& message) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kMostMessageBytes);
  if (bytes != sizeof(T)) return false;
  std::memcpy(&message, from, sizeof message);
  return true;
}

}  // namespace tardis::nvme::broker
