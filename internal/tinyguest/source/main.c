/* The ring-3 part. Words of the command line:
 *   touch=MB  memory to write to at start, a word in each page (default 64)
 *   base=MB   where that memory begins (default 64)
 *   cow=N     pages to write after a restore, before answering (default 10)
 *   hot=N     pages that mode=work rewrites for ever (default 2000)
 *   wait=1    wait for a new generation before acting on the mode, and answer '@'
 *   mode=halt sleep for ever (default)
 *   mode=spin count for ever, interrupts off
 *   mode=work rewrite the hot pages for ever; the page after them counts the rounds
 *   mode=dirty rewrite all touched memory for ever
 *   mode=ping print '.' for ever
 *   mode=flood fill the console for ever
 *   mode=garbage write garbage to every register of every device for ever
 *   mode=power switch the machine off
 *   mode=reset reset the machine
 *   mode=fault fault in the handler of a fault of a fault
 *   mode=echo send back what comes on the serial line
 * Serial output: '#' = start-up is done, '@' = runs again after a restore. */
typedef unsigned long u64;
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned short u16;

void triple_fault(void);

static inline void outb(u16 port, u8 v)
{
	__asm__ volatile("outb %0, %1" ::"a"(v), "Nd"(port));
}

static inline u8 inb(u16 port)
{
	u8 v;
	__asm__ volatile("inb %1, %0" : "=a"(v) : "Nd"(port));
	return v;
}

static void putb(u8 c) { outb(0x3f8, c); }

/* A mark is a line: what is no whole line yet, a host may hold back for a while. */
static void put_mark(u8 c)
{
	putb(c);
	putb('\n');
}

static const char *word(const char *line, const char *key)
{
	while (*line) {
		const char *k = key, *p;
		while (*line == ' ')
			line++;
		for (p = line; *k && *p == *k; p++)
			k++;
		if (!*k)
			return p;
		while (*line && *line != ' ')
			line++;
	}
	return 0;
}

static u64 number(const char *line, const char *key, u64 otherwise)
{
	const char *p = word(line, key);
	u64 n = 0;
	if (!p)
		return otherwise;
	for (; *p >= '0' && *p <= '9'; p++)
		n = n * 10 + (*p - '0');
	return n;
}

static int is(const char *mode, const char *name)
{
	while (*name)
		if (*mode++ != *name++)
			return 0;
	return *mode == 0 || *mode == ' ';
}

static void write_pages(u8 *mem, u64 pages, u64 mark)
{
	for (u64 i = 0; i < pages; i++)
		*(volatile u64 *)(mem + i * 4096) = mark + i;
}

static void garbage(void)
{
	u64 x = 88172645463325252ul;
	for (;;) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		u64 at = 0xd0000000ul + ((x >> 20) & 0xffff);
		switch (x & 7) {
		case 0:
			outb((x >> 8) & 7 ? 0x3f8 + ((x >> 8) & 7) : 0x3f9, x >> 32);
			break;
		case 1:
			(void)*(volatile u32 *)(at & ~3ul);
			break;
		case 2:
			*(volatile u8 *)at = x >> 32;
			break;
		case 3: /* doorbells */
			*(volatile u32 *)((at & ~0xffful) | 0x50) = x >> 32 & 15;
			break;
		case 4: /* status, selectors, sizes */
			*(volatile u32 *)((at & ~0xffful) | 0x70) = x >> 32 & 0xff;
			break;
		case 5:
			*(volatile u32 *)((at & ~0xffful) | 0x44) = 1;
			break;
		default:
			*(volatile u32 *)((at & ~0xffful) | (x >> 40 & 0xfc)) = x >> 32;
		}
	}
}

__attribute__((noreturn)) void user_main(u8 *zero_page)
{
	const char *line = (const char *)(u64) * (u32 *)(zero_page + 0x228);
	const char *mode = word(line, "mode=");
	u64 touch = number(line, "touch=", 64) << 8, cow = number(line, "cow=", 10), hot = number(line, "hot=", 2000);
	u8 *mem = (u8 *)(number(line, "base=", 64) << 20);
	volatile u64 *generation = (volatile u64 *)0xdfff0ul;
	volatile u64 *rounds = (volatile u64 *)(mem + hot * 4096);
	u64 pass = 1;

	if (!mode)
		mode = "halt";
	write_pages(mem, touch, pass << 32);
	/* Before the mark: whoever sees it may capture at once. */
	u64 first = *generation;
	put_mark('#');
	if (number(line, "wait=", 0)) {
		while (*generation == first)
			;
		write_pages(mem, cow, pass << 40);
		put_mark('@');
	}
	while (is(mode, "work")) {
		pass++;
		write_pages(mem, hot, pass << 32);
		*rounds = pass;
	}
	while (is(mode, "dirty"))
		write_pages(mem, touch, ++pass << 32);
	while (is(mode, "ping")) {
		if (!(++pass & 0xfffff))
			putb('.');
	}
	while (is(mode, "flood"))
		putb('x');
	while (is(mode, "echo"))
		if (inb(0x3fd) & 1)
			putb(inb(0x3f8));
	if (is(mode, "garbage"))
		garbage();
	if (is(mode, "power"))
		outb(0x601, 0x34);
	if (is(mode, "reset"))
		outb(0x600, 1);
	if (is(mode, "fault"))
		triple_fault();
	while (is(mode, "spin"))
		pass++;
	__asm__ volatile("ud2" ::: "memory");
	for (;;)
		;
}
