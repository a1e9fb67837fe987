// SPDX-License-Identifier: Apache-2.0
// Ends QEMU with the exit status (value << 1) | 1, through its device isa-debug-exit. The distribution's cloud kernels have
// no /dev/port, so a shell cannot.
#include <stdio.h>
#include <stdlib.h>
#include <sys/io.h>
#include <unistd.h>

enum { kDebugExitPort = 0xf4 };

int main(int count, char** arguments) {
  if (count != 2) {
    fprintf(stderr, "usage: qexit VALUE\n");
    return 2;
  }
  sync();
  if (ioperm(kDebugExitPort, 1, 1) != 0) {
    perror("qexit: ioperm");
    return 1;
  }
  outb((unsigned char)atoi(arguments[1]), kDebugExitPort);
  return 0;
}
