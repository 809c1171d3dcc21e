// The accesses for x86-64, where each load acquires and each store releases.
    cmp ecx, 2
    jb 20f
    je 30f
    cmp ecx, 4
    jb 40f
    cmp ecx, 6
    jb 50f
    je 60f
    cmp ecx, 8
    jb 70f
    je 80f
// Where it ends.
    lea rax, [rip + 99f]
    ret
// Words, in ascending order: at least one.
20:
    test dl, 8
    je 21f
    mov rax, [rsi]
    mov [rdi], rax
    add rsi, 8
    add rdi, 8
21:
    sub rdx, 16
    jb 23f
22:
    mov rax, [rsi]
    mov [rdi], rax
    mov rax, [rsi + 8]
    mov [rdi + 8], rax
    add rsi, 16
    add rdi, 16
    sub rdx, 16
    jae 22b
23:
    mov eax, 1
    ret
// Bytes, by registers of 16.
30:
    sub rdx, 64
    jb 32f
31:
    movups xmm0, [rsi]
    movups xmm1, [rsi + 16]
    movups xmm2, [rsi + 32]
    movups xmm3, [rsi + 48]
    movups [rdi], xmm0
    movups [rdi + 16], xmm1
    movups [rdi + 32], xmm2
    movups [rdi + 48], xmm3
    add rsi, 64
    add rdi, 64
    sub rdx, 64
    jae 31b
32:
    add rdx, 64
33:
    sub rdx, 16
    jb 34f
    movups xmm0, [rsi]
    movups [rdi], xmm0
    add rsi, 16
    add rdi, 16
    jmp 33b
// Less than 16.
34:
    test dl, 8
    je 35f
    mov rax, [rsi]
    mov [rdi], rax
    add rsi, 8
    add rdi, 8
35:
    test dl, 4
    je 36f
    mov eax, [rsi]
    mov [rdi], eax
    add rsi, 4
    add rdi, 4
36:
    test dl, 2
    je 37f
    movzx eax, word ptr [rsi]
    mov [rdi], ax
    add rsi, 2
    add rdi, 2
37:
    test dl, 1
    je 38f
    movzx eax, byte ptr [rsi]
    mov [rdi], al
38:
    mov eax, 1
    ret
// Bytes, by registers of 32 whose stores are aligned: at least 128.
40:
    vmovdqu ymm0, [rsi]
    vmovdqu [rdi], ymm0
    mov eax, edi
    neg eax
    and eax, 31
    add rsi, rax
    add rdi, rax
    sub rdx, rax
    sub rdx, 128
    jb 42f
41:
    vmovdqu ymm0, [rsi]
    vmovdqu ymm1, [rsi + 32]
    vmovdqu ymm2, [rsi + 64]
    vmovdqu ymm3, [rsi + 96]
    vmovdqu [rdi], ymm0
    vmovdqu [rdi + 32], ymm1
    vmovdqu [rdi + 64], ymm2
    vmovdqu [rdi + 96], ymm3
    sub rsi, -128
    sub rdi, -128
    sub rdx, 128
    jae 41b
42:
    sub rdx, -128
    vzeroupper
    jmp 30b
// Bytes, one after the other: at least one.
50:
    xor ecx, ecx
51:
    movzx eax, byte ptr [rsi + rcx]
    mov [rdi + rcx], al
    inc rcx
    cmp rcx, rdx
    jb 51b
    mov eax, 1
    ret
// Adds.
60:
    lock xadd [rdi], rdx
    mov eax, 1
    ret
// Compares and swaps.
70:
    mov rax, rdx
    lock cmpxchg [rdi], r8
    mov rdx, rax
    mov eax, 1
    ret
// Copies rounds of 256 bytes and sums: at least one.
80:
    vmovdqu64 zmm8, [r8]
    vmovdqu64 zmm0, [rsi]
    vmovdqu64 zmm1, [rsi + 64]
    vmovdqu64 zmm2, [rsi + 128]
    vmovdqu64 zmm3, [rsi + 192]
    vmovdqu64 [rdi], zmm0
    vmovdqu64 [rdi + 64], zmm1
    vmovdqu64 [rdi + 128], zmm2
    vmovdqu64 [rdi + 192], zmm3
// The CRC starts with all ones.
    mov eax, -1
    vmovd xmm9, eax
    vpxorq zmm0, zmm0, zmm9
    sub rdx, 256
    je 82f
81:
    add rsi, 256
    add rdi, 256
    vmovdqu64 zmm4, [rsi]
    vmovdqu64 zmm5, [rsi + 64]
    vmovdqu64 zmm6, [rsi + 128]
    vmovdqu64 zmm7, [rsi + 192]
    vmovdqu64 [rdi], zmm4
    vmovdqu64 [rdi + 64], zmm5
    vmovdqu64 [rdi + 128], zmm6
    vmovdqu64 [rdi + 192], zmm7
    vpclmulqdq zmm10, zmm0, zmm8, 0x11
    vpclmulqdq zmm11, zmm1, zmm8, 0x11
    vpclmulqdq zmm12, zmm2, zmm8, 0x11
    vpclmulqdq zmm13, zmm3, zmm8, 0x11
    vpclmulqdq zmm0, zmm0, zmm8, 0x00
    vpclmulqdq zmm1, zmm1, zmm8, 0x00
    vpclmulqdq zmm2, zmm2, zmm8, 0x00
    vpclmulqdq zmm3, zmm3, zmm8, 0x00
    vpternlogq zmm0, zmm10, zmm4, 0x96
    vpternlogq zmm1, zmm11, zmm5, 0x96
    vpternlogq zmm2, zmm12, zmm6, 0x96
    vpternlogq zmm3, zmm13, zmm7, 0x96
    sub rdx, 256
    jne 81b
82:
    vmovdqu64 [r8 + 64], zmm0
    vmovdqu64 [r8 + 128], zmm1
    vmovdqu64 [r8 + 192], zmm2
    vmovdqu64 [r8 + 256], zmm3
    vzeroupper
    mov eax, 1
    ret
// After a fault.
99:
    xor eax, eax
    ret
