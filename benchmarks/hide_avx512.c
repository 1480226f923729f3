// Hides AVX-512 and AMX from a process. LD_AUDIT loads it, so that it sees each library before its first instruction.
// benchmarks/without_avx512.py compiles it and sets the environment.
//
// CPUID does not trap on every processor and in every virtual machine. So each CPUID instruction of a library, found once by
// objdump, is replaced by UD2, which has the same length, and the handler of SIGILL returns the result.
//
// HIDE_AVX512_CACHE   folder of the found addresses, one file per library
// HIDE_AVX512         0: hide nothing
// HIDE_AVX512_COUNT   file of two numbers: samples of the process, and samples at an EVEX instruction
#define _GNU_SOURCE
#include <cpuid.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

enum { MOST = 65536 };
static uintptr_t patched[MOST];
static int patched_count;
static volatile uint64_t *samples;

static int is_patched(uintptr_t address) {
  for (int index = 0; index < patched_count; ++index)
    if (patched[index] == address) return 1;
  return 0;
}

static void answer_cpuid(int number, siginfo_t *info, void *context) {
  greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
  if (!is_patched(registers[REG_RIP])) {  // a UD2 of the program, which crashes as usual
    signal(number, SIG_DFL);
    return;
  }
  uint32_t leaf = registers[REG_RAX], part = registers[REG_RCX], a, b, c, d;
  __cpuid_count(leaf, part, a, b, c, d);
  if (leaf == 7 && part == 0) {
    b &= ~(1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31);
    c &= ~(1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14);
    d &= ~(1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25);
  } else if (leaf == 7 && part == 1) {
    a &= ~(1u << 5 | 1u << 21);  // AVX512_BF16, AMX-FP16
    d &= ~(1u << 8 | 1u << 19);  // AMX-COMPLEX, AVX10
  }
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

static void count_sample(int number, siginfo_t *info, void *context) {
  const uint8_t *next = (const uint8_t *)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
  __atomic_fetch_add(&samples[0], 1, __ATOMIC_RELAXED);
  if (*next == 0x62) __atomic_fetch_add(&samples[1], 1, __ATOMIC_RELAXED);
}

static void handle(int number, void (*handler)(int, siginfo_t *, void *)) {
  struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK};
  sigaction(number, &action, NULL);
}

static void fail(const char *what, const char *which) {
  fprintf(stderr, "hide_avx512: %s %s\n", what, which);
  _exit(127);
}

// The addresses of a file's CPUID instructions, one per line. objdump runs without this library.
static FILE *addresses(const char *path) {
  struct stat seen;
  char cached[8192];
  const char *folder = getenv("HIDE_AVX512_CACHE"), *name = strrchr(path, '/');
  if (!folder) fail("no folder:", "HIDE_AVX512_CACHE");
  if (stat(path, &seen)) return NULL;
  snprintf(cached, sizeof cached, "%s/%s-%ld-%ld", folder, name ? name + 1 : path, (long)seen.st_size,
           (long)seen.st_mtime);
  if (access(cached, R_OK)) {
    // Only addresses of the millions of lines are kept; a failure is one of the lines.
    char *find = "{ objdump -d --no-show-raw-insn \"$1\" || echo fails:; } | "
                 "awk -F: '/\\tcpuid/ {print $1} /^fails:/ {failed = 1} END {exit failed}' > \"$2.$$\" && mv \"$2.$$\" \"$2\"";
    char *arguments[] = {"sh", "-c", find, "sh", (char *)path, cached, NULL};
    char *environment[] = {"PATH=/usr/local/bin:/usr/bin:/bin", NULL};
    pid_t child;
    int status = 1;
    if (posix_spawn(&child, "/bin/sh", NULL, NULL, arguments, environment)) fail("cannot run", "/bin/sh");
    if (waitpid(child, &status, 0) != child || status) fail("objdump cannot read", path);
  }
  return fopen(cached, "r");
}

static void patch(uintptr_t address) {
  const uintptr_t page = sysconf(_SC_PAGESIZE), start = address & ~(page - 1);
  uint8_t *bytes = (uint8_t *)address;
  if (bytes[0] != 0x0F || bytes[1] != 0xA2) return;
  if (patched_count == MOST) fail("too many instructions", "CPUID");
  if (mprotect((void *)start, address + 2 - start, PROT_READ | PROT_WRITE | PROT_EXEC)) fail("cannot change", "code");
  patched[patched_count++] = address;
  bytes[1] = 0x0B;
  mprotect((void *)start, address + 2 - start, PROT_READ | PROT_EXEC);
}

unsigned int la_version(unsigned int version) {
  const char *count = getenv("HIDE_AVX512_COUNT"), *hide = getenv("HIDE_AVX512");
  if (!hide || *hide != '0') handle(SIGILL, answer_cpuid);
  if (count) {
    const int file = open(count, O_RDWR | O_CREAT, 0666);
    if (file < 0 || ftruncate(file, 16)) fail("cannot write", count);
    samples = mmap(NULL, 16, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    handle(SIGPROF, count_sample);
    const struct itimerval every = {{0, 1000}, {0, 1000}};
    setitimer(ITIMER_PROF, &every, NULL);
  }
  return version;
}

unsigned int la_objopen(struct link_map *object, Lmid_t space, uintptr_t *cookie) {
  const char *hide = getenv("HIDE_AVX512");
  char path[PATH_MAX], line[64];
  if (hide && *hide == '0') return 0;
  if (!realpath(*object->l_name ? object->l_name : "/proc/self/exe", path)) return 0;
  FILE *found = addresses(path);
  while (found && fgets(line, sizeof line, found)) patch(object->l_addr + strtoull(line, NULL, 16));
  if (found) fclose(found);
  return 0;
}
