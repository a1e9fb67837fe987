// SPDX-License-Identifier: Apache-2.0
// NVM Express on the wire: registers, queue entries, Identify data, status. For host and device code (C++17); no logic
// beyond packing and unpacking. Sections: NVM Express Base Specification 2.2, NVM-CS (NVM Command Set 1.1) and PCIe-T
// (PCIe Transport 1.1).
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define TARDIS_HD __host__ __device__
#else
#define TARDIS_HD
#endif

namespace tardis::nvme {

// ---- controller registers (3.1.4), offsets in BAR0
enum Register : std::uint32_t {
  kRegCap = 0x00,    // 64 bits
  kRegVs = 0x08,     // version
  kRegIntms = 0x0c,  // not to be touched under MSI-X
  kRegIntmc = 0x10,
  kRegCc = 0x14,
  kRegCsts = 0x1c,
  kRegNssr = 0x20,
  kRegAqa = 0x24,
  kRegAsq = 0x28,  // 64 bits
  kRegAcq = 0x30,  // 64 bits
  kRegCmbloc = 0x38,
  kRegCmbsz = 0x3c,
  kRegCmbmsc = 0x50,  // 64 bits
  kRegCmbsts = 0x58,
  kRegCrto = 0x68,
  kRegDoorbells = 0x1000,
};
inline constexpr std::uint32_t kNssrReset = 0x4e564d65;  // "NVMe" (3.1.4.7)

// PCIe-T 3.1.2. `stride`: CAP.DSTRD as it is read, an exponent.
TARDIS_HD constexpr std::uint32_t sq_tail_doorbell(std::uint32_t queue, std::uint32_t stride) {
  return kRegDoorbells + 2 * queue * (4u << stride);
}
TARDIS_HD constexpr std::uint32_t cq_head_doorbell(std::uint32_t queue, std::uint32_t stride) {
  return kRegDoorbells + (2 * queue + 1) * (4u << stride);
}
// Behind both of a queue. Those of high queues and strides have no offset of 32 bits: only where this is within the
// window are the two above true.
TARDIS_HD constexpr std::uint64_t doorbells_end(std::uint32_t queue, std::uint32_t stride) {
  return kRegDoorbells + (2 * std::uint64_t{queue} + 1) * (std::uint64_t{4} << stride) + 4;
}
static_assert(sq_tail_doorbell(17, 0) == 0x1088 && cq_head_doorbell(17, 0) == 0x108c && doorbells_end(17, 0) == 0x1090);

// CAP (3.1.4.1)
struct Capabilities {
  std::uint64_t raw;
  TARDIS_HD constexpr std::uint32_t max_queue_entries() const {  // MQES is 0-based
    return static_cast<std::uint32_t>(raw & 0xffff) + 1;
  }
  TARDIS_HD constexpr bool contiguous_queues() const { return raw >> 16 & 1; }               // CQR
  TARDIS_HD constexpr std::uint32_t timeout_ms() const { return (raw >> 24 & 0xff) * 500; }  // TO
  TARDIS_HD constexpr std::uint32_t doorbell_stride() const { return raw >> 32 & 0xf; }      // DSTRD
  TARDIS_HD constexpr bool subsystem_reset() const { return raw >> 36 & 1; }                 // NSSRS
  TARDIS_HD constexpr bool nvm_commands() const { return raw >> 37 & 1; }                    // CSS bit 0
  static constexpr std::uint64_t kCommandSets = std::uint64_t{1} << 43;                      // CSS bit 6
  TARDIS_HD constexpr bool command_sets() const { return raw & kCommandSets; }  // each namespace says which is its own
  TARDIS_HD constexpr std::uint32_t min_page_shift() const { return 12 + (raw >> 48 & 0xf); }  // MPSMIN
  TARDIS_HD constexpr std::uint32_t max_page_shift() const { return 12 + (raw >> 52 & 0xf); }  // MPSMAX
  TARDIS_HD static constexpr Capabilities of(std::uint32_t max_queue_entries, std::uint32_t timeout_ms,
                                             std::uint32_t stride, std::uint32_t min_page_shift,
                                             std::uint32_t max_page_shift) {
    return {static_cast<std::uint64_t>(max_queue_entries - 1) | std::uint64_t{1} << 16 |
            static_cast<std::uint64_t>((timeout_ms + 499) / 500) << 24 | static_cast<std::uint64_t>(stride) << 32 |
            std::uint64_t{1} << 37 | static_cast<std::uint64_t>(min_page_shift - 12) << 48 |
            static_cast<std::uint64_t>(max_page_shift - 12) << 52};
  }
};

// CC (3.1.4.5)
enum ConfigurationBits : std::uint32_t {
  kCcEnable = 1u << 0,
  kCcCssShift = 4,
  kCcMpsShift = 7,  // memory page size is 2^(12+MPS)
  kCcAmsShift = 11,
  kCcShnShift = 14,
  kCcShnMask = 3u << 14,
  kCcShnNormal = 1u << 14,
  kCcShnAbrupt = 2u << 14,
  kCcIosqesShift = 16,
  kCcIocqesShift = 20,
};
inline constexpr std::uint32_t kSubmissionEntryShift = 6, kCompletionEntryShift = 4;

// CSTS (3.1.4.6)
enum StatusBits : std::uint32_t {
  kCstsReady = 1u << 0,
  kCstsFatal = 1u << 1,
  kCstsShstMask = 3u << 2,
  kCstsShstNormal = 0u << 2,
  kCstsShstOccurring = 1u << 2,
  kCstsShstComplete = 2u << 2,
  kCstsSubsystemReset = 1u << 4,
};
inline constexpr std::uint32_t kRegisterGone = 0xffffffff;  // what every register of a removed controller reads as

// AQA (3.1.4.8): both sizes are 0-based
TARDIS_HD constexpr std::uint32_t admin_queue_attributes(std::uint32_t sq_entries, std::uint32_t cq_entries) {
  return (sq_entries - 1) | (cq_entries - 1) << 16;
}

inline constexpr std::uint32_t kMaxAdminEntries = 4096, kMaxQueueEntries = 65536, kMinQueueEntries = 2;  // 3.3.1
inline constexpr std::uint32_t kPageBytes = 4096;      // the page size that this driver sets
inline constexpr std::uint16_t kNoCommandId = 0xffff;  // "no command" in the error log; never used for one (3.3.1)
inline constexpr std::uint32_t kAllNamespaces = 0xffffffff;

// ---- submission queue entry (4.1.1)
enum class AdminOpcode : std::uint8_t {
  kDeleteSq = 0x00,
  kCreateSq = 0x01,
  kGetLogPage = 0x02,
  kDeleteCq = 0x04,
  kCreateCq = 0x05,
  kIdentify = 0x06,
  kAbort = 0x08,
  kSetFeatures = 0x09,
  kGetFeatures = 0x0a,
  kAsyncEvent = 0x0c,
  kDoorbellBufferConfig = 0x7c,
};
enum class IoOpcode : std::uint8_t {  // NVM-CS 3.3
  kFlush = 0x00,
  kWrite = 0x01,
  kRead = 0x02,
  kWriteZeroes = 0x08,
  kDatasetManagement = 0x09,
};
enum class DataPointer : std::uint8_t { kPrp = 0, kSgl = 1, kSglMetadata = 2 };  // PSDT

// SGL descriptor (4.3.2)
enum class SglType : std::uint8_t { kDataBlock = 0, kBitBucket = 1, kSegment = 2, kLastSegment = 3, kKeyed = 4 };
struct SglDescriptor {
  std::uint64_t address;
  std::uint32_t length;
  std::uint8_t reserved[3];
  std::uint8_t type;  // SglType in 7:4, subtype in 3:0; over PCIe only subtype 0
  TARDIS_HD constexpr SglType kind() const { return static_cast<SglType>(type >> 4); }
  TARDIS_HD constexpr std::uint8_t subtype() const { return type & 0xf; }
  TARDIS_HD static constexpr SglDescriptor of(SglType kind, std::uint64_t address, std::uint32_t length) {
    return {address, length, {0, 0, 0}, static_cast<std::uint8_t>(static_cast<unsigned>(kind) << 4)};
  }
};
static_assert(sizeof(SglDescriptor) == 16 && offsetof(SglDescriptor, length) == 8 &&
              offsetof(SglDescriptor, type) == 15);

struct PrpPair {
  std::uint64_t prp1, prp2;
};
static_assert(sizeof(PrpPair) == 16);

struct alignas(64) SubmissionEntry {
  std::uint8_t opcode;       // DW0 7:0
  std::uint8_t flags;        // DW0 15:8: FUSE 1:0, PSDT 7:6
  std::uint16_t command_id;  // DW0 31:16
  std::uint32_t namespace_id;
  std::uint32_t cdw2, cdw3;
  std::uint64_t metadata;  // MPTR
  union {                  // DPTR, DW6-9
    PrpPair prp;
    SglDescriptor sgl;
  };
  std::uint32_t cdw10, cdw11, cdw12, cdw13, cdw14, cdw15;
  TARDIS_HD constexpr DataPointer data_pointer() const { return static_cast<DataPointer>(flags >> 6); }
  TARDIS_HD constexpr void set_data_pointer(DataPointer kind) {
    flags = static_cast<std::uint8_t>((flags & 0x3f) | static_cast<unsigned>(kind) << 6);
  }
  TARDIS_HD constexpr std::uint64_t start_block() const {  // SLBA of I/O commands (NVM-CS 3.3)
    return static_cast<std::uint64_t>(cdw11) << 32 | cdw10;
  }
  TARDIS_HD constexpr void set_start_block(std::uint64_t block) {
    cdw10 = static_cast<std::uint32_t>(block);
    cdw11 = static_cast<std::uint32_t>(block >> 32);
  }
  TARDIS_HD constexpr std::uint32_t blocks() const { return (cdw12 & 0xffff) + 1; }  // NLB is 0-based
};
static_assert(sizeof(SubmissionEntry) == 64 && offsetof(SubmissionEntry, namespace_id) == 4 &&
              offsetof(SubmissionEntry, metadata) == 16 && offsetof(SubmissionEntry, prp) == 24 &&
              offsetof(SubmissionEntry, cdw10) == 40 && offsetof(SubmissionEntry, cdw15) == 60);
inline constexpr std::uint32_t kMaxBlocksPerCommand = 65536;  // NLB is 16 bits, 0-based
inline constexpr std::uint32_t kForceUnitAccess = 1u << 30;   // CDW12 of read and write (NVM-CS 3.3.4)
inline constexpr std::uint32_t kDeallocate = 1u << 2;         // CDW11 of dataset management: AD (NVM-CS 3.3.3)

// ---- completion queue entry (4.2.1)
struct alignas(16) CompletionEntry {
  std::uint32_t result;  // DW0, command specific
  std::uint32_t reserved;
  std::uint16_t sq_head;
  std::uint16_t sq_id;
  std::uint16_t command_id;
  std::uint16_t status;  // P 0, SC 8:1, SCT 11:9, CRD 13:12, M 14, DNR 15
  TARDIS_HD constexpr bool phase() const { return status & 1; }
};
static_assert(sizeof(CompletionEntry) == 16 && offsetof(CompletionEntry, sq_head) == 8 &&
              offsetof(CompletionEntry, command_id) == 12 && offsetof(CompletionEntry, status) == 14);

// Status without the phase (4.2.3): SCT in 10:8, SC in 7:0, retry fields above. A command succeeded only if both are 0.
struct CommandStatus {
  std::uint16_t raw;  // the entry's status field >> 1
  TARDIS_HD constexpr bool ok() const { return (raw & 0x7ff) == 0; }
  TARDIS_HD constexpr std::uint8_t code() const { return raw & 0xff; }      // SC
  TARDIS_HD constexpr std::uint8_t type() const { return raw >> 8 & 0x7; }  // SCT
  TARDIS_HD constexpr std::uint16_t code_and_type() const { return raw & 0x7ff; }
  TARDIS_HD constexpr std::uint8_t retry_delay() const { return raw >> 11 & 0x3; }  // CRD
  TARDIS_HD constexpr bool do_not_retry() const { return raw >> 14 & 1; }           // DNR
  TARDIS_HD static constexpr CommandStatus of(const CompletionEntry& entry) {
    return {static_cast<std::uint16_t>(entry.status >> 1)};
  }
};

inline constexpr std::uint16_t kDoNotRetry = 1u << 14;  // DNR, of CommandStatus::raw

// SCT << 8 | SC
enum Sc : std::uint16_t {
  kScSuccess = 0x000,
  kScInvalidOpcode = 0x001,
  kScInvalidField = 0x002,
  kScCommandIdConflict = 0x003,
  kScDataTransferError = 0x004,
  kScPowerLossAbort = 0x005,
  kScInternal = 0x006,
  kScAbortRequested = 0x007,
  kScSqDeleted = 0x008,
  kScInvalidNamespace = 0x00b,
  kScCommandSequence = 0x00c,
  kScInvalidSglSegment = 0x00d,
  kScInvalidSglCount = 0x00e,
  kScSglLengthInvalid = 0x00f,
  kScSglTypeInvalid = 0x011,
  kScPrpOffsetInvalid = 0x013,
  kScSglOffsetInvalid = 0x016,
  kScSglGranularity = 0x01e,
  kScWriteProtected = 0x020,
  kScLbaOutOfRange = 0x080,
  kScCapacityExceeded = 0x081,
  kScNamespaceNotReady = 0x082,
  kScInvalidCq = 0x100,
  kScInvalidQueueId = 0x101,
  kScInvalidQueueSize = 0x102,
  kScAbortLimit = 0x103,
  kScAsyncEventLimit = 0x105,
  kScInvalidVector = 0x108,
  kScInvalidLogPage = 0x109,
  kScInvalidQueueDeletion = 0x10c,
  kScWriteFault = 0x280,
  kScUnrecoveredRead = 0x281,
  kScUnwrittenBlock = 0x287,
};

// ---- Create I/O CQ / SQ, Delete (5.2): CDW10 and CDW11
TARDIS_HD constexpr std::uint32_t queue_identity(std::uint32_t entries, std::uint32_t queue) {
  return (entries - 1) << 16 | queue;
}
inline constexpr std::uint32_t kQueueContiguous = 1u << 0, kQueueInterrupts = 1u << 1;

// ---- features (5.1.25)
enum FeatureId : std::uint8_t { kFeatureVolatileCache = 0x06, kFeatureQueues = 0x07, kFeatureAsyncEvents = 0x0b };

// ---- log pages (5.1.12): CDW10
enum LogPage : std::uint8_t { kLogErrors = 0x01, kLogHealth = 0x02, kLogFirmware = 0x03 };
inline constexpr std::uint32_t kRetainEvent = 1u << 15;  // RAE: reading the page does not clear its event

// ---- asynchronous events (5.1.2.1): DW0 of the completion: type 2:0, information 15:8, log page 23:16
enum AsyncEvent : std::uint32_t { kEventNoSuchDoorbell = 0x010000, kEventDoorbellValue = 0x010100 };

// ---- Identify (5.1.13)
enum IdentifyCns : std::uint8_t {
  kCnsNamespace = 0x00,
  kCnsController = 0x01,
  kCnsActiveNamespaces = 0x02,
  kCnsDescriptors = 0x03
};
inline constexpr std::uint32_t kIdentifyBytes = 4096;

struct IdentifyController {
  std::uint16_t vendor, subsystem_vendor;  // 0
  char serial[20];                         // 4, ASCII padded with spaces
  char model[40];                          // 24
  char firmware[8];                        // 64
  std::uint8_t reserved72[4];
  std::uint8_t cmic;             // 76
  std::uint8_t mdts;             // 77: 2^n pages of CAP.MPSMIN; 0: no limit
  std::uint16_t controller_id;   // 78
  std::uint32_t version;         // 80
  std::uint32_t rtd3_resume_us;  // 84
  std::uint32_t rtd3_entry_us;   // 88: bounds a shutdown
  std::uint32_t oaes, ctratt;    // 92
  std::uint8_t reserved100[28];
  std::uint16_t retry_delay_100ms[3];  // 128, CRDT1-3
  std::uint8_t reserved134[122];
  std::uint16_t oacs;                                                              // 256
  std::uint8_t abort_limit;                                                        // 258, 0-based
  std::uint8_t async_event_limit;                                                  // 259, 0-based
  std::uint8_t firmware_updates, log_attributes, error_log_entries, power_states;  // 260
  std::uint8_t reserved264[248];
  std::uint8_t sqes, cqes;     // 512: least 3:0, most 7:4
  std::uint16_t max_commands;  // 514
  std::uint32_t namespaces;    // 516, NN
  std::uint16_t oncs;          // 520: dataset management 2, write zeroes 3
  std::uint16_t fuses;
  std::uint8_t fna;             // 524
  std::uint8_t volatile_cache;  // 525, VWC: present 0, flush of all namespaces 2:1
  std::uint16_t awun, awupf;    // 526: blocks written atomically, and across a power failure; 0-based
  std::uint8_t icsvscc, nwpc;   // 530
  std::uint16_t acwu, cdfs;     // 532
  std::uint32_t sgls;           // 536, SglSupport
  std::uint8_t reserved540[228];
  char subsystem[256];  // 768, SUBNQN
  std::uint8_t reserved1024[779];
  std::uint8_t sgl_blocks;  // 1803, MSDBD: most data block descriptors of a command; 0: not said
  std::uint8_t reserved1804[2292];
};
static_assert(sizeof(IdentifyController) == kIdentifyBytes && offsetof(IdentifyController, mdts) == 77 &&
              offsetof(IdentifyController, version) == 80 && offsetof(IdentifyController, retry_delay_100ms) == 128 &&
              offsetof(IdentifyController, oacs) == 256 && offsetof(IdentifyController, sqes) == 512 &&
              offsetof(IdentifyController, namespaces) == 516 && offsetof(IdentifyController, volatile_cache) == 525 &&
              offsetof(IdentifyController, awun) == 526 && offsetof(IdentifyController, sgls) == 536 &&
              offsetof(IdentifyController, subsystem) == 768 && offsetof(IdentifyController, sgl_blocks) == 1803);

enum OptionalAdmin : std::uint16_t { kOacsDoorbellBuffer = 1u << 8 };

enum SglSupport : std::uint32_t {
  kSglMask = 3,
  kSglNone = 0,
  kSglAnyAlignment = 1,
  kSglDword = 2,
  kSglBitBucket = 1u << 16,
  kSglLongerThanData = 1u << 18,
};
enum OptionalCommands : std::uint16_t { kOncsDatasetManagement = 1u << 2, kOncsWriteZeroes = 1u << 3 };

struct LbaFormat {
  std::uint16_t metadata_bytes;
  std::uint8_t block_shift;  // LBADS, at least 9
  std::uint8_t performance;
};
static_assert(sizeof(LbaFormat) == 4);

inline constexpr std::uint8_t kNsfeatThin = 1;            // NSFEAT: fewer blocks can be there than it has (THINP)
inline constexpr std::uint8_t kNsattrWriteProtected = 1;  // NSATTR

struct IdentifyNamespace {        // NVM-CS 4.1.5.1
  std::uint64_t size_blocks;      // 0, NSZE
  std::uint64_t capacity_blocks;  // 8
  std::uint64_t used_blocks;      // 16
  std::uint8_t nsfeat;            // 24
  std::uint8_t formats;           // 25, NLBAF, 0-based
  std::uint8_t format;            // 26, FLBAS: index 3:0 and 6:5
  std::uint8_t metadata_caps, protection_caps;
  std::uint8_t protection;  // 29, DPS: 0 in 2:0 is none
  std::uint8_t nmic, rescap, fpi;
  std::uint8_t deallocate;                     // 33, DLFEAT
  std::uint16_t nawun, nawupf, nacwu;          // 34
  std::uint16_t nabsn, nabo, nabspf;           // 40
  std::uint16_t optimal_boundary;              // 46, NOIOB in blocks; 0: none
  std::uint8_t nvm_capacity[16];               // 48
  std::uint16_t npwg, npwa, npdg, npda, nows;  // 64
  std::uint16_t mssrl;                         // 74
  std::uint32_t mcl;
  std::uint8_t msrc;
  std::uint8_t reserved81[18];
  std::uint8_t attributes;  // 99, NSATTR: bit 0 write protected
  std::uint16_t nvmset, endgid;
  std::uint8_t nguid[16];      // 104
  std::uint8_t eui64[8];       // 120
  LbaFormat format_table[64];  // 128
  std::uint8_t vendor[3712];   // 384
  TARDIS_HD constexpr std::uint32_t format_index() const { return (format & 0xfu) | (format >> 5 & 3u) << 4; }
  TARDIS_HD constexpr const LbaFormat& lba_format() const { return format_table[format_index()]; }
};
static_assert(sizeof(IdentifyNamespace) == kIdentifyBytes && offsetof(IdentifyNamespace, format) == 26 &&
              offsetof(IdentifyNamespace, deallocate) == 33 && offsetof(IdentifyNamespace, optimal_boundary) == 46 &&
              offsetof(IdentifyNamespace, attributes) == 99 && offsetof(IdentifyNamespace, nguid) == 104 &&
              offsetof(IdentifyNamespace, format_table) == 128 && offsetof(IdentifyNamespace, vendor) == 384);

// CNS 03h: a list of these, each with its value behind it; one of length 0 ends it.
struct NamespaceDescriptor {
  std::uint8_t type, length;
  std::uint8_t reserved[2];
};
static_assert(sizeof(NamespaceDescriptor) == 4);
enum DescriptorType : std::uint8_t { kDescriptorNguid = 2, kDescriptorCommandSet = 4 };  // NIDT
enum CommandSet : std::uint8_t {                                                         // CSI
  kCommandSetNvm = 0,
  kCommandSetKeyValue = 1,
  kCommandSetZoned = 2,
  kCommandSetLocalMemory = 3,
  kCommandSetPrograms = 4
};

struct DeallocateRange {  // NVM-CS 3.3.3
  std::uint32_t attributes;
  std::uint32_t blocks;  // 1-based
  std::uint64_t start;
};
static_assert(sizeof(DeallocateRange) == 16);

}  // namespace tardis::nvme
