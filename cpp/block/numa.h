// SPDX-License-Identifier: Apache-2.0
// Which NUMA node a device hangs on, and the processors beside a block device.
#pragma once

#include <sched.h>
#include <sys/types.h>

#include <optional>
#include <string>

namespace tardis {

struct NumaPlace {
  int node = -1;
  cpu_set_t cpus;  // of the node, of those this process may use
};

// A list as sysfs writes them ("0-3,8"); empty if it is none, or names a processor beyond cpu_set_t.
std::optional<cpu_set_t> parse_cpu_list(const std::string& text);

// Where threads that serve the block device `device` belong. Empty, and so nothing to bind, if the machine has one node
// only, if the device has none (memory, network, several disks), or if this process may use no processor of it.
// `sysfs`: "/sys", or a copy of it in tests.
std::optional<NumaPlace> numa_place(dev_t device, const std::string& sysfs = "/sys");

// The node of a PCI device ("0000:3b:00.0", in any case). Empty: the machine has one node only, or does not say.
std::optional<int> numa_node_of_pci(const std::string& address, const std::string& sysfs = "/sys");

}  // namespace tardis
