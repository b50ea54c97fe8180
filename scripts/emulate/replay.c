/* Replays recorded calls of compiled kernels on the bare machine and compares all memory that they touched.
 *
 * The recording (see record.py) is a module that the boot loader put into memory, made of 64-bit words:
 *   calls: number; each: index of the function, number of arguments, arguments, number of ranges,
 *          each range: virtual address, bytes, kind (0 data, else 1 + index of a callback, whose address it is), then for kind 0
 *          the bytes before, padded to 8, and the bytes expected after.
 * Ranges are mapped at the addresses that they had, so that every pointer of the recording is valid.
 */
#include <immintrin.h>
#include <stdarg.h>
#include <stdint.h>

typedef uint64_t u64;

extern u64 idt[][2], pml4[];
extern char vectors[], _end[];
extern const u64 functions[];        /* made by record.py: addresses of the kernels */
extern const char *const names[];
extern const u64 callbacks[];
u64 invoke(u64 function, const u64 *arguments, u64 count);

static void outb(uint16_t port, uint8_t value) { __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port)); }
static uint8_t inb(uint16_t port) {
    uint8_t value;
    __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}
static void putch(char c) {
    while (!(inb(0x3fd) & 0x20)) { }
    outb(0x3f8, c);
}
static void put(const char *text) { while (*text) putch(*text++); }
static void hex(u64 value) { for (int i = 60; i >= 0; i -= 4) putch("0123456789abcdef"[(value >> i) & 15]); }
static void number(u64 value) {
    if (value >= 10) number(value / 10);
    putch('0' + value % 10);
}
static void stop(void) {
    put("END\n");
    for (const char *c = "Shutdown"; *c; c++) outb(0x8900, *c); /* Bochs ends */
    for (;;) __asm__ volatile("hlt");
}

static const char *running = "start";
void fault(u64 vector, const u64 *frame) {
    put("FAULT "); number(vector);
    for (int i = 0; i < 3; i++) { put(" "); hex(frame[i]); }
    put(" in "); put(running); put("\n");
    stop();
}

/* Memory: consecutive pages after the modules. */
static u64 next_page;
static void *page(void) {
    u64 *fresh = (u64 *)next_page;
    next_page += 4096;
    for (int i = 0; i < 512; i++) fresh[i] = 0;
    return fresh;
}
static void map(u64 address) {
    u64 *table = pml4;
    for (int level = 39; level > 12; level -= 9) {
        u64 *entry = &table[(address >> level) & 511];
        if (!(*entry & 1)) *entry = (u64)page() | 3;
        table = (u64 *)(*entry & ~4095ull);
    }
    u64 *entry = &table[(address >> 12) & 511];
    if (!(*entry & 1)) *entry = (u64)page() | 3;
}

void *memcpy(void *to, const void *from, u64 n) {
    void *start = to;
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(n) : : "memory");
    return start;
}
void *memset(void *to, int value, u64 n) {
    void *start = to;
    __asm__ volatile("rep stosb" : "+D"(to), "+c"(n) : "a"(value) : "memory");
    return start;
}
void *memmove(void *to, const void *from, u64 n) {
    if (to <= from) return memcpy(to, from, n);
    for (char *t = to; n--;) t[n] = ((const char *)from)[n];
    return to;
}

/* Numba's arrays: a reference count, three unused pointers, the data. */
static char heap[1 << 20] __attribute__((aligned(64)));
static u64 used;
void *NRT_MemInfo_alloc_aligned(u64 size, uint32_t align) {
    (void)align;
    u64 *info = (u64 *)(heap + used);
    used += (size + 191) / 64 * 64;
    info[0] = 1;
    info[1] = info[2] = 0;
    info[3] = (u64)info + 64;
    return info;
}
void *NRT_MemInfo_alloc_safe_aligned(u64 size, uint32_t align) { return NRT_MemInfo_alloc_aligned(size, align); }
void NRT_MemInfo_call_dtor(void *info) { (void)info; }
void NRT_Free(void *info) { (void)info; }

/* Which NaN a sum of two becomes is the compiler's choice: those of bf16 and f32 are all the same here. */
static int both_nan(const unsigned char *got, const unsigned char *expected, u64 at) {
    const uint16_t *a = (const uint16_t *)(got + (at & ~1ull)), *b = (const uint16_t *)(expected + (at & ~1ull));
    if ((*a & 0x7fff) > 0x7f80 && (*b & 0x7fff) > 0x7f80) return 1;
    const uint32_t *c = (const uint32_t *)(got + (at & ~3ull)), *d = (const uint32_t *)(expected + (at & ~3ull));
    return (*c & 0x7fffffff) > 0x7f800000 && (*d & 0x7fffffff) > 0x7f800000;
}

void kmain(u64 boot) {
    outb(0x3f9, 0); outb(0x3fb, 0x80); outb(0x3f8, 1); outb(0x3f9, 0); outb(0x3fb, 3); outb(0x3fa, 7);
    for (int i = 0; i < 32; i++) {
        u64 at = (u64)vectors + 32 * i;
        idt[i][0] = (at & 0xffff) | 8ull << 16 | 0x8e00ull << 32 | (at >> 16 & 0xffff) << 48;
        idt[i][1] = at >> 32;
    }
    put("XCR0 "); hex(_xgetbv(0)); put("\n");
    const uint32_t *module = (const uint32_t *)(u64)((const uint32_t *)boot)[6];
    const u64 *word = (const u64 *)(u64)module[0];
    next_page = ((u64)module[1] + 4095) & ~4095ull;
    u64 calls = *word++, wrong = 0;
    for (u64 call = 0; call < calls; call++) {
        u64 function = *word++, count = *word++;
        const u64 *arguments = word;
        word += count;
        u64 ranges = *word++;
        const u64 *first = word;
        for (u64 r = 0; r < ranges; r++) {
            u64 address = word[0], size = word[1], kind = word[2], padded = (size + 7) / 8;
            for (u64 at = address & ~4095ull; at < address + size; at += 4096) map(at);
            memcpy((void *)address, kind ? (const void *)&callbacks[kind - 1] : (const void *)(word + 3), size);
            word += 3 + (kind ? 0 : 2 * padded);
        }
        running = names[function];
        used = 0;
        invoke(functions[function], arguments, count);
        for (u64 r = 0; r < ranges; r++) {
            u64 size = first[1], kind = first[2], padded = (size + 7) / 8, bad = 0, at = 0;
            const unsigned char *got = (const unsigned char *)first[0];
            const unsigned char *expected = (const unsigned char *)(first + 3 + padded);
            for (u64 i = 0; i < size && !kind; i++)
                if (got[i] != expected[i] && !both_nan(got, expected, i) && !bad++) at = i;
            if (bad) {
                wrong++;
                put("WRONG call "); number(call); put(" "); put(running); put(" range "); number(r);
                put(" of "); number(size); put(" bytes: "); number(bad); put(" differ, first at "); number(at);
                put(" got "); hex(*(const u64 *)(got + (at & ~7ull)));
                put(" expected "); hex(*(const u64 *)(expected + (at & ~7ull))); put("\n");
            }
            first += 3 + (kind ? 0 : 2 * padded);
        }
    }
    number(calls); put(" calls, "); number(wrong); put(" wrong\n");
    stop();
}
