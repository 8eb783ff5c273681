/* floor: what forking a small VM costs at least on this host. One process makes N VMs of
 * one memory file and its state by the bare ioctls, in the quickest order we know: no
 * processes, no devices, no confinement. forkd bench vmm compares itself with it.
 *
 *   floor MEMORY MIB STATE N THREADS
 *
 * STATE is a file of forkd (docs/format/vmstate.md). Every VM gets the next generation at
 * 0xdfff0 and has to print one byte on port 0x3f8. Prints one line of JSON: the time for
 * all (ms), the median and 90th percentile of one, and what destroying all took. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/kvm.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <errno.h>

#define MUST(x) ({ long r_; do r_ = (long)(x); while (r_ < 0 && errno == EINTR); if (r_ < 0) { perror(#x); exit(1); } r_; })

enum { MP_STATE, REGS, SREGS, XSAVE, XCRS, DEBUGREGS, LAPIC, EVENTS, ITEMS };
enum { KIND_CPUID = 2, KIND_CLOCK, KIND_IRQCHIP, KIND_ITEM, KIND_MSRS };

struct entry { uint32_t kind, index; uint64_t offset, length; };

static uint8_t *state;
static size_t memory_bytes;
static int kvm_fd, memory_fd, count, run_size;
static double *took;
static struct vm { int fd, vcpu; void *mem; struct kvm_run *run; } *vms;

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static uint8_t *section(uint32_t kind, uint32_t index, uint64_t *length)
{
	struct entry *e = (struct entry *)(state + 32);
	for (uint32_t n = *(uint32_t *)(state + 12); n--; e++)
		if (e->kind == kind && e->index == index) {
			if (length)
				*length = e->length;
			return state + e->offset;
		}
	fprintf(stderr, "floor: the state has no section %u/%u\n", kind, index);
	exit(1);
}

static void set(struct vm *v, unsigned long request, int item)
{
	MUST(ioctl(v->vcpu, request, section(KIND_ITEM, item, NULL)));
}

static void load(struct vm *v)
{
	uint64_t length;
	uint8_t *b = section(KIND_CPUID, 0, &length);
	struct kvm_cpuid2 *cpuid = calloc(1, sizeof *cpuid + length);
	cpuid->nent = length / sizeof cpuid->entries[0];
	memcpy(cpuid->entries, b, length);
	MUST(ioctl(v->vcpu, KVM_SET_CPUID2, cpuid));
	free(cpuid);
	struct kvm_clock_data clock = { .clock = *(uint64_t *)section(KIND_CLOCK, 0, NULL) };
	MUST(ioctl(v->fd, KVM_SET_CLOCK, &clock));
	for (int i = 0; i < 3; i++)
		MUST(ioctl(v->fd, KVM_SET_IRQCHIP, section(KIND_IRQCHIP, i, NULL)));
	set(v, KVM_SET_MP_STATE, MP_STATE);
	set(v, KVM_SET_REGS, REGS);
	set(v, KVM_SET_SREGS, SREGS);
	set(v, KVM_SET_XSAVE, XSAVE);
	set(v, KVM_SET_XCRS, XCRS);
	set(v, KVM_SET_DEBUGREGS, DEBUGREGS);
	set(v, KVM_SET_LAPIC, LAPIC);
	b = section(KIND_MSRS, 0, &length);
	struct kvm_msrs *msrs = calloc(1, sizeof *msrs + length);
	msrs->nmsrs = length / sizeof msrs->entries[0];
	memcpy(msrs->entries, b, length);
	MUST(ioctl(v->vcpu, KVM_SET_MSRS, msrs));
	free(msrs);
	set(v, KVM_SET_VCPU_EVENTS, EVENTS);
}

static void fork_one(int i)
{
	struct vm *v = &vms[i];
	double start = now();
	v->fd = MUST(ioctl(kvm_fd, KVM_CREATE_VM, 0));
	v->mem = mmap(NULL, memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, memory_fd, 0);
	struct kvm_userspace_memory_region slot = { .memory_size = memory_bytes, .userspace_addr = (uintptr_t)v->mem };
	MUST(ioctl(v->fd, KVM_SET_USER_MEMORY_REGION, &slot)); /* before the irqchip: 5 ms less */
	MUST(ioctl(v->fd, KVM_CREATE_IRQCHIP, 0));
	v->vcpu = MUST(ioctl(v->fd, KVM_CREATE_VCPU, 0));
	v->run = mmap(NULL, run_size, PROT_READ | PROT_WRITE, MAP_SHARED, v->vcpu, 0);
	load(v);
	*(volatile uint64_t *)((char *)v->mem + 0xdfff0) = i + 1000;
	do
		MUST(ioctl(v->vcpu, KVM_RUN, 0));
	while (v->run->exit_reason != KVM_EXIT_IO || v->run->io.port != 0x3f8);
	took[i] = now() - start;
}

static void *worker(void *first)
{
	static int next;
	(void)first;
	for (int i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < count;)
		fork_one(i);
	return NULL;
}

static int order(const void *a, const void *b) { return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b); }

int main(int argc, char **argv)
{
	if (argc != 6) {
		fprintf(stderr, "usage: floor MEMORY MIB STATE N THREADS\n");
		return 2;
	}
	memory_fd = MUST(open(argv[1], O_RDONLY));
	memory_bytes = (size_t)atoi(argv[2]) << 20;
	int state_fd = MUST(open(argv[3], O_RDONLY)), threads = atoi(argv[5]);
	size_t n = lseek(state_fd, 0, SEEK_END);
	state = malloc(n);
	MUST(pread(state_fd, state, n, 0));
	count = atoi(argv[4]);
	vms = calloc(count, sizeof *vms);
	took = calloc(count, sizeof *took);
	kvm_fd = MUST(open("/dev/kvm", O_RDWR));
	run_size = MUST(ioctl(kvm_fd, KVM_GET_VCPU_MMAP_SIZE, 0));
	pthread_t *t = calloc(threads, sizeof *t);
	double start = now();
	for (int i = 0; i < threads; i++)
		pthread_create(&t[i], NULL, worker, NULL);
	for (int i = 0; i < threads; i++)
		pthread_join(t[i], NULL);
	double all = now() - start;
	qsort(took, count, sizeof *took, order);
	double destroy = now();
	for (int i = 0; i < count; i++) {
		munmap(vms[i].run, run_size);
		close(vms[i].vcpu);
		close(vms[i].fd);
		munmap(vms[i].mem, memory_bytes);
	}
	printf("{\"total_ms\":%.3f,\"p50_ms\":%.3f,\"p90_ms\":%.3f,\"destroy_ms\":%.3f}\n", all, took[count / 2], took[count * 9 / 10], now() - destroy);
	return 0;
}
