/* SPDX-License-Identifier: MIT */
/*
 * Written for this copy: upstream generates this file with its configure script. Each question the script asks with a test
 * compile is asked here with __has_include or with the macro that the header in question defines.
 */
#ifndef LIBURING_COMPAT_H
#define LIBURING_COMPAT_H

#include <inttypes.h>
#include <sys/wait.h>

#include <linux/fs.h>
#ifndef RWF_HIPRI
typedef int __kernel_rwf_t;
#endif

#if __has_include("linux/time_types.h")
#include <linux/time_types.h>
#else
struct __kernel_timespec {
	int64_t		tv_sec;
	long long	tv_nsec;
};
#endif
#define UAPI_LINUX_IO_URING_H_SKIP_LINUX_TIME_TYPES_H 1

#if __has_include("linux/openat2.h")
#include <linux/openat2.h>
#else
struct open_how {
	uint64_t	flags;
	uint64_t	mode;
	uint64_t	resolve;
};
#endif

#include <linux/futex.h>
#ifndef FUTEX_WAITV_MAX
#define FUTEX_32	2
#define FUTEX_WAITV_MAX	128

struct futex_waitv {
	uint64_t	val;
	uint64_t	uaddr;
	uint32_t	flags;
	uint32_t	__reserved;
};
#endif

#if __has_include("linux/blkdev.h")
#include <linux/blkdev.h>
#endif
#include <linux/ioctl.h>
#ifndef BLOCK_URING_CMD_DISCARD
#define BLOCK_URING_CMD_DISCARD                        _IO(0x12, 0)
#endif

#endif
