# Entered in 64-bit mode at CPL 0 by the Linux boot protocol (rsi = zero page). Drops to
# ring 3 as soon as it can; ring 3 comes back only to sleep, by ud2. Code here uses only
# what an instruction emulator may be expected to know.
	.section .boot,"ax"
	.globl _start
_start:
	cli
	cld
	lgdt	gdtr(%rip)

	# Page tables: 4 GiB mapped to themselves, for user code too.
	lea	pml4(%rip), %rax
	lea	pdpt + 7(%rip), %rbx
	mov	%rbx, (%rax)
	lea	pd + 7(%rip), %rbx
	lea	pdpt(%rip), %rdi
	mov	$4, %ecx
1:	mov	%rbx, (%rdi)
	add	$4096, %rbx
	add	$8, %rdi
	dec	%ecx
	jnz	1b
	mov	$0x87, %ebx
	lea	pd(%rip), %rdi
	mov	$2048, %ecx
2:	mov	%rbx, (%rdi)
	add	$0x200000, %rbx
	add	$8, %rdi
	dec	%ecx
	jnz	2b
	mov	%rax, %cr3
	lea	kstack_top(%rip), %rsp

	# Interrupts: every vector is a fault, except the invalid opcode, which is sleep.
	lea	idt(%rip), %rdi
	mov	$32, %ecx
3:	lea	fault(%rip), %rax
	cmp	$32 - 6, %ecx
	jne	4f
	lea	sleep(%rip), %rax
4:	mov	%ax, (%rdi)
	movw	$8, 2(%rdi)
	movw	$0x8e00, 4(%rdi)
	shr	$16, %rax
	mov	%ax, 6(%rdi)
	add	$16, %rdi
	dec	%ecx
	jnz	3b
	lidt	idtr(%rip)

	# TSS: a stack for ring 0 and an I/O map that allows every port. IOPL 3 alone is not
	# enough everywhere: kvm_pvm loses it in iretq.
	lea	kstack_top(%rip), %rax
	mov	%rax, tss + 4(%rip)
	movl	$0x00680000, tss + 100(%rip)
	movb	$0xff, tss + 104 + 8192(%rip)
	lea	tss(%rip), %rax
	mov	%ax, tss_desc + 2(%rip)
	shr	$16, %rax
	mov	%al, tss_desc + 4(%rip)
	mov	%ah, tss_desc + 7(%rip)
	mov	$0x38, %eax
	ltr	%ax

	mov	%rsi, %rdi
	lea	user_entry(%rip), %rdx
	lea	ustack_top(%rip), %rcx
	pushq	$0x33
	push	%rcx
	pushq	$0x3002
	pushq	$0x2b
	push	%rdx
	iretq

sleep:	hlt				# interrupts are off: for ever
	jmp	sleep

fault:	mov	$0x3f8, %dx
	mov	$'!', %al
	out	%al, %dx
5:	hlt
	jmp	5b

	.globl triple_fault
triple_fault:				# ring 3 breaks the tables and faults
	movq	$0, pml4(%rip)
	movq	$0, idt + 14 * 16(%rip)
	ud2

	.text
user_entry:
	call	user_main
6:	jmp	6b

	.data
	.balign	16
gdt:	.quad	0
	.quad	0x00af9b000000ffff	# 08 kernel code 64
	.quad	0x00cf93000000ffff	# 10 kernel data
	.quad	0			# 18
	.quad	0			# 20
	.quad	0x00affb000000ffff	# 28 user code 64
	.quad	0x00cff3000000ffff	# 30 user data
tss_desc:
	.quad	0x0000890000002068	# 38 TSS, its base is filled in
	.quad	0
gdt_end:
	.balign	8
gdtr:	.word	gdt_end - gdt - 1
	.quad	gdt
	.balign	8
idtr:	.word	32 * 16 - 1
	.quad	idt

	.bss
	.balign	4096
pml4:	.skip	4096
pdpt:	.skip	4096
pd:	.skip	4 * 4096
idt:	.skip	4096
tss:	.skip	12288
	.skip	4096
kstack_top:
	.skip	8192
ustack_top:
	.section .note.GNU-stack,"",@progbits
