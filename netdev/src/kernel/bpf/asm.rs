//! An assembler for the few eBPF instructions that our programs use.
//!
//! Encoding: kernel `Documentation/bpf/standardization/instruction-set.rst` and
//! `include/uapi/linux/bpf.h`. An instruction is eight bytes: opcode, destination and source
//! register, signed 16-bit offset, signed 32-bit immediate. Multi-byte fields have the host's
//! order.

/// A register: `R0` is the return value, `R1`–`R5` are arguments and clobbered by calls, `R6`–`R9`
/// survive calls, `R10` is the read-only frame pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs, reason = "register names explain themselves")]
pub enum Reg {
    R0 = 0,
    R1 = 1,
    R2 = 2,
    R3 = 3,
    R4 = 4,
    R5 = 5,
    R6 = 6,
    R7 = 7,
    R8 = 8,
    R9 = 9,
    R10 = 10,
}

/// Width of a load or store (`BPF_B`, `BPF_H`, `BPF_W`, `BPF_DW`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Size {
    /// One byte.
    B = 0x10,
    /// Two bytes.
    H = 0x08,
    /// Four bytes.
    W = 0x00,
    /// Eight bytes.
    Dw = 0x18,
}

/// The condition of a jump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Cond {
    /// Equal.
    Eq = 0x10,
    /// Unsigned greater than.
    Gt = 0x20,
    /// Any common bit set.
    Set = 0x40,
    /// Not equal.
    Ne = 0x50,
    /// Signed greater than.
    SGt = 0x60,
}

/// Helper functions by their number (`__BPF_FUNC_MAPPER` in `bpf.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Helper {
    /// `void *bpf_map_lookup_elem(map, key)`.
    MapLookupElem = 1,
    /// `u64 bpf_ktime_get_ns(void)`: CLOCK_MONOTONIC.
    KtimeGetNs = 5,
    /// `long bpf_redirect(ifindex, flags)`.
    Redirect = 23,
    /// `long bpf_skb_load_bytes(skb, offset, to, len)`.
    SkbLoadBytes = 26,
    /// `long bpf_redirect_map(map, key, flags)`.
    RedirectMap = 51,
    /// `void *bpf_ringbuf_reserve(map, size, flags)`.
    RingbufReserve = 131,
    /// `void bpf_ringbuf_submit(record, flags)`.
    RingbufSubmit = 132,
}

/// One instruction, laid out as `struct bpf_insn`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Insn {
    /// Class, source bit and operation or size and mode.
    pub code: u8,
    /// Destination register and source register, a nibble each.
    pub regs: u8,
    /// Offset of a memory access in bytes or of a jump in instructions.
    pub off: i16,
    /// Immediate.
    pub imm: i32,
}

/// A jump target, bound now or later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Label(usize);

/// Collects instructions and resolves jumps.
#[derive(Debug, Default)]
pub struct Asm {
    code: Vec<Insn>,
    labels: Vec<Option<usize>>,
    jumps: Vec<(usize, Label)>,
}

// Instruction classes, source bits, modes and operations.
const LDX_MEM: u8 = 0x61;
const STX_MEM: u8 = 0x63;
const ST_MEM: u8 = 0x62;
/// The mode of a store that is an atomic operation; the immediate says which, and 0 is an addition.
const ATOMIC: u8 = 0xc0;
const MODE: u8 = 0xe0;
const JMP_REG: u8 = 0x0d;
const JMP_IMM: u8 = 0x05;
const JMP32_IMM: u8 = 0x06;
const JMP_ALWAYS: u8 = 0x05;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const LD_IMM64: u8 = 0x18;
const LD_ABS: u8 = 0x20;
const PSEUDO_MAP_FD: u8 = 1;
const PSEUDO_MAP_VALUE: u8 = 2;

/// Methods that add an operation of a 64-bit register with another, or with an immediate.
macro_rules! alu64 {
    (
        registers: $($(#[$about:meta])+ $by:ident = $by_code:literal,)+
        immediates: $($(#[$imm_about:meta])+ $by_imm:ident = $imm_code:literal,)+
    ) => {
        impl Asm {
            $($(#[$about])+
            pub fn $by(&mut self, dst: Reg, src: Reg) {
                self.emit($by_code, dst, src as u8, 0, 0);
            })+

            $($(#[$imm_about])+
            pub fn $by_imm(&mut self, dst: Reg, imm: i32) {
                self.emit($imm_code, dst, 0, 0, imm);
            })+
        }
    };
}

alu64! {
    registers:
    /// `dst = src`.
    mov = 0xbf,
    /// `dst += src`.
    add = 0x0f,
    /// `dst -= src`.
    subtract = 0x1f,
    /// `dst |= src`.
    or = 0x4f,
    immediates:
    /// `dst = imm`, sign-extended.
    mov_imm = 0xb7,
    /// `dst += imm`.
    add_imm = 0x07,
    /// `dst &= imm`, sign-extended.
    and_imm = 0x57,
    /// `dst *= imm`.
    multiply_imm = 0x27,
    /// `dst <<= imm`.
    shift_left_imm = 0x67,
    /// `dst >>= imm`, unsigned.
    shift_right_imm = 0x77,
}

impl Asm {
    /// A label that [`bind`](Self::bind) places.
    pub fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    /// Makes `label` point to the next instruction.
    pub fn bind(&mut self, label: Label) {
        assert!(self.labels[label.0].is_none(), "label bound twice");
        self.labels[label.0] = Some(self.code.len());
    }

    /// `dst = *(size *)(src + off)`, zero-extended.
    pub fn load(&mut self, size: Size, dst: Reg, src: Reg, off: i16) {
        self.emit(LDX_MEM | size as u8, dst, src as u8, off, 0);
    }

    /// `*(size *)(dst + off) = src`.
    pub fn store(&mut self, size: Size, dst: Reg, off: i16, src: Reg) {
        self.emit(STX_MEM | size as u8, dst, src as u8, off, 0);
    }

    /// `*(size *)(dst + off) = imm`.
    pub fn store_imm(&mut self, size: Size, dst: Reg, off: i16, imm: i32) {
        self.emit(ST_MEM | size as u8, dst, 0, off, imm);
    }

    /// `*(u64 *)(dst + off) += src`, atomically.
    pub fn atomic_add(&mut self, dst: Reg, off: i16, src: Reg) {
        self.emit(STX_MEM & !MODE | ATOMIC | Size::Dw as u8, dst, src as u8, off, 0);
    }

    /// Jumps if the 64-bit registers satisfy the condition.
    pub fn jump_if(&mut self, cond: Cond, left: Reg, right: Reg, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.emit(JMP_REG | cond as u8, left, right as u8, 0, 0);
    }

    /// Jumps if the 64-bit register and `imm`, sign-extended, satisfy the condition.
    pub fn jump_if_imm(&mut self, cond: Cond, left: Reg, imm: i32, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.emit(JMP_IMM | cond as u8, left, 0, 0, imm);
    }

    /// Jumps if the lower 32 bits of `left` and `imm` satisfy the condition (no sign extension in
    /// between).
    pub fn jump32_if_imm(&mut self, cond: Cond, left: Reg, imm: u32, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.emit(JMP32_IMM | cond as u8, left, 0, 0, imm.cast_signed());
    }

    /// Jumps.
    pub fn jump(&mut self, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.emit(JMP_ALWAYS, Reg::R0, 0, 0, 0);
    }

    /// `dst = map`, by the map's file descriptor; takes two instruction slots.
    pub fn load_map(&mut self, dst: Reg, fd: i32) {
        self.emit(LD_IMM64, dst, PSEUDO_MAP_FD, 0, fd);
        self.emit(0, Reg::R0, 0, 0, 0);
    }

    /// `dst = &map[0]` of an array, by the map's file descriptor; takes two instruction slots.
    pub fn load_map_value(&mut self, dst: Reg, fd: i32) {
        self.emit(LD_IMM64, dst, PSEUDO_MAP_VALUE, 0, fd);
        self.emit(0, Reg::R0, 0, 0, 0);
    }

    /// Calls a helper.
    pub fn call(&mut self, helper: Helper) {
        self.emit(CALL, Reg::R0, 0, 0, helper as i32);
    }

    /// Returns `R0`.
    pub fn exit(&mut self) {
        self.emit(EXIT, Reg::R0, 0, 0, 0);
    }

    /// `R0 = *(size *)(packet + off)`, from network order. The context is in R6, and R1 to R5 are
    /// clobbered. Returns 0 from the program if the packet ends before.
    pub fn load_packet(&mut self, size: Size, off: i32) {
        self.emit(LD_ABS | size as u8, Reg::R0, 0, 0, off);
    }

    /// Copies `len` bytes of the packet, from the offset in R2 on, to the stack at `to`. The
    /// context is in R6. Jumps to `short` if there are fewer.
    pub fn copy_packet(&mut self, to: i16, len: i32, short: Label) {
        self.mov(Reg::R1, Reg::R6);
        self.mov(Reg::R3, Reg::R10);
        self.add_imm(Reg::R3, i32::from(to));
        self.mov_imm(Reg::R4, len);
        self.call(Helper::SkbLoadBytes);
        self.jump_if_imm(Cond::Ne, Reg::R0, 0, short);
    }

    /// The program, with all jumps resolved. Panics on a label that was never bound or is out of
    /// reach: a bug in the program's source, independent of any input.
    pub fn assemble(mut self) -> Vec<Insn> {
        for (at, label) in self.jumps {
            let target = self.labels[label.0].expect("unbound label").cast_signed();
            let distance = target - at.cast_signed() - 1;
            self.code[at].off = i16::try_from(distance).expect("jump out of reach");
        }
        self.code
    }

    fn emit(&mut self, code: u8, dst: Reg, src: u8, off: i16, imm: i32) {
        let regs = if cfg!(target_endian = "little") {
            src << 4 | dst as u8
        } else {
            (dst as u8) << 4 | src
        };
        self.code.push(Insn { code, regs, off, imm });
    }
}

/// The result of a 16-bit load of `value` in network order.
pub fn net_u16(value: u16) -> u32 {
    u32::from(value.to_be())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(build: impl FnOnce(&mut Asm)) -> Insn {
        let mut asm = Asm::default();
        build(&mut asm);
        asm.assemble()[0]
    }

    // Encodings as `llvm-mc -arch=bpf` documents them in the kernel's instruction-set.rst.
    #[test]
    #[cfg(target_endian = "little")]
    fn instructions_encode_as_the_kernel_documents_them() {
        let insn = |code, regs, off, imm| Insn { code, regs, off, imm };
        assert_eq!(one(|a| a.load(Size::W, Reg::R2, Reg::R1, 4)), insn(0x61, 0x12, 4, 0));
        assert_eq!(one(|a| a.load(Size::H, Reg::R5, Reg::R2, 12)), insn(0x69, 0x25, 12, 0));
        assert_eq!(one(|a| a.load(Size::B, Reg::R5, Reg::R2, 14)), insn(0x71, 0x25, 14, 0));
        assert_eq!(one(|a| a.store(Size::W, Reg::R10, -4, Reg::R5)), insn(0x63, 0x5a, -4, 0));
        assert_eq!(one(|a| a.store_imm(Size::W, Reg::R10, -16, 7)), insn(0x62, 0x0a, -16, 7));
        assert_eq!(one(|a| a.mov(Reg::R4, Reg::R2)), insn(0xbf, 0x24, 0, 0));
        assert_eq!(one(|a| a.mov_imm(Reg::R0, 2)), insn(0xb7, 0x00, 0, 2));
        assert_eq!(one(|a| a.add_imm(Reg::R4, 42)), insn(0x07, 0x04, 0, 42));
        assert_eq!(one(|a| a.shift_right_imm(Reg::R5, 4)), insn(0x77, 0x05, 0, 4));
        assert_eq!(one(|a| a.add(Reg::R9, Reg::R1)), insn(0x0f, 0x19, 0, 0));
        assert_eq!(one(|a| a.subtract(Reg::R4, Reg::R7)), insn(0x1f, 0x74, 0, 0));
        assert_eq!(one(|a| a.and_imm(Reg::R0, 0xe0)), insn(0x57, 0x00, 0, 0xe0));
        assert_eq!(one(|a| a.load_packet(Size::H, 12)), insn(0x28, 0x00, 0, 12));
        assert_eq!(one(|a| a.multiply_imm(Reg::R7, 800)), insn(0x27, 0x07, 0, 800));
        assert_eq!(one(|a| a.or(Reg::R5, Reg::R4)), insn(0x4f, 0x45, 0, 0));
        assert_eq!(one(|a| a.shift_left_imm(Reg::R1, 3)), insn(0x67, 0x01, 0, 3));
        assert_eq!(one(|a| a.atomic_add(Reg::R0, 0, Reg::R1)), insn(0xdb, 0x10, 0, 0));
        assert_eq!(one(|a| a.call(Helper::RedirectMap)), insn(0x85, 0, 0, 51));
        assert_eq!(one(Asm::exit), insn(0x95, 0, 0, 0));
        assert_eq!(one(|a| a.load_map(Reg::R1, 9)), insn(0x18, 0x11, 0, 9));
    }

    #[test]
    fn jumps_count_from_the_next_instruction_in_both_directions() {
        let mut asm = Asm::default();
        let (start, end) = (asm.label(), asm.label());
        asm.bind(start);
        asm.jump32_if_imm(Cond::Ne, Reg::R5, 0xffff_ffff, end);
        asm.jump_if(Cond::Gt, Reg::R4, Reg::R3, end);
        asm.jump(start);
        asm.jump_if_imm(Cond::Eq, Reg::R0, 0, end);
        asm.bind(end);
        asm.exit();
        let code = asm.assemble();
        assert_eq!((code[0].code, code[0].off, code[0].imm), (0x56, 3, -1));
        assert_eq!((code[1].code, code[1].off), (0x2d, 2));
        assert_eq!((code[2].code, code[2].off), (0x05, -3));
        assert_eq!((code[3].code, code[3].regs, code[3].off, code[3].imm), (0x15, 0, 0, 0));
    }

    #[test]
    #[should_panic(expected = "unbound label")]
    fn an_unbound_label_is_a_bug() {
        let mut asm = Asm::default();
        let nowhere = asm.label();
        asm.jump(nowhere);
        asm.assemble();
    }
}
