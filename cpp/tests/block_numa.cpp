// SPDX-License-Identifier: Apache-2.0
// Placement by NUMA node, on folders that look like sysfs.
#include "block/numa.h"

#include <pthread.h>
#include <sys/sysmacros.h>

#include <fstream>
#include <mutex>

#include "block/worker_pool.h"
#include "tests/block_support.h"

namespace tardis {
namespace {

namespace fs = std::filesystem;
using testing::TempFolder;

TEST(Numa, CpuLists) {
  const auto count = [](const char* text) {
    const auto cpus = parse_cpu_list(text);
    return cpus ? CPU_COUNT(&*cpus) : -1;
  };
  EXPECT_EQ(count("0"), 1);
  EXPECT_EQ(count("0-3"), 4);
  EXPECT_EQ(count("0-3,8,10-11\n"), 7);
  EXPECT_EQ(count(""), 0);
  for (const char* broken : {"x", "3-", "3-1", "1,,2", "1;2", "99999"}) EXPECT_EQ(count(broken), -1) << broken;
}

// Two nodes; partition 259:1 of a disk on a controller of node `disk_node`.
class NumaSysfs : public ::testing::Test {
 protected:
  void SetUp() override {
    cpu_set_t allowed;
    ASSERT_EQ(::sched_getaffinity(0, sizeof allowed, &allowed), 0);
    for (cpu_ = 0; !CPU_ISSET(cpu_, &allowed);) ++cpu_;
    put("devices/system/node/online", "0-1\n");
    put("devices/system/node/node0/cpulist", "1000-1001\n");
    put("devices/system/node/node1/cpulist", std::to_string(cpu_) + "\n");
    put("devices/pci0000:00/0000:00:05.0/numa_node", "1\n");
    put("devices/pci0000:00/0000:00:05.0/nvme/nvme0/nvme0n1/nvme0n1p1/partition", "1\n");
    fs::create_directories(root_ + "/dev/block");
    fs::create_symlink("../../devices/pci0000:00/0000:00:05.0/nvme/nvme0/nvme0n1/nvme0n1p1",
                       root_ + "/dev/block/259:1");
  }
  void put(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ + "/" + path).parent_path());
    std::ofstream(root_ + "/" + path) << text;
  }

  TempFolder folder_;
  std::string root_ = folder_.path();
  int cpu_ = 0;
};

TEST_F(NumaSysfs, TheNodeOfThePartitionsController) {
  const auto place = numa_place(makedev(259, 1), root_);
  ASSERT_TRUE(place);
  EXPECT_EQ(place->node, 1);
  EXPECT_EQ(CPU_COUNT(&place->cpus), 1);
  EXPECT_TRUE(CPU_ISSET(cpu_, &place->cpus));
}

TEST_F(NumaSysfs, NothingToBindTo) {
  EXPECT_FALSE(numa_place(makedev(259, 2), root_)) << "no such device";
  EXPECT_FALSE(numa_place(makedev(259, 1), root_ + "/nothing"));
  put("devices/pci0000:00/0000:00:05.0/numa_node", "0\n");
  EXPECT_FALSE(numa_place(makedev(259, 1), root_)) << "this process may use no processor of that node";
  put("devices/pci0000:00/0000:00:05.0/numa_node", "-1\n");
  EXPECT_FALSE(numa_place(makedev(259, 1), root_)) << "the firmware did not say";
  put("devices/pci0000:00/0000:00:05.0/numa_node", "1\n");
  put("devices/system/node/online", "0\n");
  EXPECT_FALSE(numa_place(makedev(259, 1), root_)) << "one node only";
}

TEST_F(NumaSysfs, TheNodeOfAPciDevice) {
  fs::create_directories(root_ + "/bus/pci/devices");
  for (const char* name : {"0000:00:05.0", "0000:3b:00.0"}) {
    fs::create_symlink(std::string("../../../devices/pci0000:00/") + name, root_ + "/bus/pci/devices/" + name);
  }
  EXPECT_EQ(numa_node_of_pci("0000:00:05.0", root_), 1);
  EXPECT_FALSE(numa_node_of_pci("0000:3B:00.0", root_)) << "not there";
  put("devices/pci0000:00/0000:3b:00.0/numa_node", "0\n");
  EXPECT_EQ(numa_node_of_pci("0000:3B:00.0", root_), 0) << "as CUDA writes it";
  put("devices/pci0000:00/0000:3b:00.0/numa_node", "-1\n");
  EXPECT_FALSE(numa_node_of_pci("0000:3b:00.0", root_)) << "the firmware did not say";
  put("devices/system/node/online", "0\n");
  EXPECT_FALSE(numa_node_of_pci("0000:00:05.0", root_)) << "one node only";
}

TEST_F(NumaSysfs, WorkersRunWhereTheyAreBound) {
  const auto place = numa_place(makedev(259, 1), root_);
  ASSERT_TRUE(place);
  auto pool = WorkerPool::create(2, &place->cpus);
  ASSERT_TRUE(pool) << pool.error().message;
  const pthread_t owner = pthread_self();
  std::mutex mutex;
  int workers = 0, wrong = 0;
  for (int round = 0; round < 200 && workers < 50; ++round) {
    (*pool)->parallel_for(8, 3, [&](std::size_t) {
      ::usleep(200);
      if (pthread_equal(pthread_self(), owner) != 0) return;
      cpu_set_t mine;
      const bool known = pthread_getaffinity_np(pthread_self(), sizeof mine, &mine) == 0;
      const std::lock_guard lock(mutex);
      ++workers;
      if (!known || CPU_EQUAL(&mine, &place->cpus) == 0) ++wrong;
    });
  }
  EXPECT_GT(workers, 0);
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace tardis
