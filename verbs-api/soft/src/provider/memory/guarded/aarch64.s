// The accesses for AArch64.
    cmp w3, #1
    b.lo 20f
    b.eq 30f
    cmp w3, #4
    b.lo 40f
    b.eq 45f
    cmp w3, #6
    b.lo 50f
    b.eq 60f
    cmp w3, #7
    b.eq 70f
// Where it ends.
    adr x0, 99f
    ret
// Loads words, in ascending order: at least one.
20:
    ldar x6, [x1]
    str x6, [x0], #8
    add x1, x1, #8
    subs x2, x2, #8
    b.ne 20b
    mov x0, #1
    ret
// Stores words, in ascending order: at least one.
30:
    ldr x6, [x1], #8
    stlr x6, [x0]
    add x0, x0, #8
    subs x2, x2, #8
    b.ne 30b
    mov x0, #1
    ret
// Bytes in any units.
40:
    cmp x2, #64
    b.lo 41f
    ldp q0, q1, [x1]
    ldp q2, q3, [x1, #32]
    stp q0, q1, [x0]
    stp q2, q3, [x0, #32]
    add x1, x1, #64
    add x0, x0, #64
    sub x2, x2, #64
    b 40b
41:
    cmp x2, #8
    b.lo 42f
    ldr x6, [x1], #8
    str x6, [x0], #8
    sub x2, x2, #8
    b 41b
42:
    cbz x2, 43f
    ldrb w6, [x1], #1
    strb w6, [x0], #1
    sub x2, x2, #1
    b 42b
43:
    mov x0, #1
    ret
// Loads bytes, one after the other: at least one.
45:
    ldarb w6, [x1]
    strb w6, [x0], #1
    add x1, x1, #1
    subs x2, x2, #1
    b.ne 45b
    mov x0, #1
    ret
// Stores bytes, one after the other: at least one.
50:
    ldrb w6, [x1], #1
    stlrb w6, [x0]
    add x0, x0, #1
    subs x2, x2, #1
    b.ne 50b
    mov x0, #1
    ret
// Adds.
60:
    ldaxr x6, [x0]
    add x7, x6, x2
    stlxr w5, x7, [x0]
    cbnz w5, 60b
    mov x1, x6
    mov x0, #1
    ret
// Compares and swaps.
70:
    ldaxr x6, [x0]
    cmp x6, x2
    b.ne 71f
    stlxr w5, x4, [x0]
    cbnz w5, 70b
71:
    mov x1, x6
    mov x0, #1
    ret
// After a fault.
99:
    mov x0, #0
    ret
