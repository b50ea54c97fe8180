/* Multiboot entry: 32-bit to 64-bit, identity map of 4 GB, all vector and tile state enabled. */
.set FLAGS, 0x10003
.section .head, "ax"
.code32
.align 8
header:
  .long 0x1BADB002, FLAGS, -(0x1BADB002 + FLAGS)
  .long header, 0x100000, _edata, _end, start
.global start
start:
  cli
  mov $stack_top, %esp
  mov %ebx, %ebp
  /* page tables: 4 GB of 2 MB pages */
  mov $pd, %edi
  mov $0x83, %eax
1: mov %eax, (%edi)
  movl $0, 4(%edi)
  add $8, %edi
  add $0x200000, %eax
  jnc 1b
  mov $pdpt, %edi
  mov $pd + 3, %eax
  mov $4, %ecx
2: mov %eax, (%edi)
  add $8, %edi
  add $4096, %eax
  loop 2b
  movl $pdpt + 3, pml4
  mov $pml4, %eax
  mov %eax, %cr3
  mov %cr4, %eax
  or $0x40620, %eax       /* PAE, OSFXSR, OSXMMEXCPT, OSXSAVE */
  mov %eax, %cr4
  mov $0xC0000080, %ecx
  rdmsr
  or $0x100, %eax
  wrmsr
  mov %cr0, %eax
  and $~0x6, %eax
  or $0x80000002, %eax
  mov %eax, %cr0
  lgdt gdtr
  ljmp $8, $long_mode
.code64
long_mode:
  mov $16, %eax
  mov %eax, %ds
  mov %eax, %es
  mov %eax, %ss
  lidt idtr
  mov $0xd, %eax
  xor %ecx, %ecx
  cpuid
  and $0x600e7, %eax      /* x87, SSE, AVX, AVX-512, AMX: what is there of them */
  xor %ecx, %ecx
  xor %edx, %edx
  xsetbv
  mov $stack_top, %rsp
  mov %ebp, %edi
  call kmain
9: hlt
  jmp 9b
.align 32
.global vectors
vectors:
.set n, 0
.rept 32
  .align 32
  mov %rsp, %rsi
  mov $n, %edi
  call fault
  .set n, n + 1
.endr
/* invoke(function, arguments, count): a call with any number of 64-bit arguments */
.global invoke
invoke:
  push %rbp
  push %rbx
  mov %rsp, %rbp
  mov %rdi, %rax
  mov %rsi, %rbx
  mov %rdx, %rcx
  and $-16, %rsp          /* the ABI wants a multiple of 16 at the call */
  sub $6, %rdx
  jle 2f
  test $1, %rdx
  jz 1f
  sub $8, %rsp
1: pushq -8(%rbx, %rcx, 8)
  dec %rcx
  cmp $6, %rcx
  ja 1b
2: mov (%rbx), %rdi
  mov 8(%rbx), %rsi
  mov 16(%rbx), %rdx
  mov 24(%rbx), %rcx
  mov 32(%rbx), %r8
  mov 40(%rbx), %r9
  call *%rax
  mov %rbp, %rsp
  pop %rbx
  pop %rbp
  ret
.section .note.GNU-stack, "", @progbits
.section .data
.align 16
gdt: .quad 0, 0x00af9a000000ffff, 0x00cf92000000ffff
gdtr: .word 23
  .quad gdt
.align 16
.global idt
idtr: .word 511
  .quad idt
.section .bss
.align 4096
.global pml4
pml4: .skip 4096
pdpt: .skip 4096
pd: .skip 16384
idt: .skip 512
.skip 1 << 20
stack_top:
