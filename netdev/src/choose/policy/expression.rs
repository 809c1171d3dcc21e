//! Whether an nftables rule could affect a RoCEv2 datagram.
//!
//! A rule is a list of expressions that load fields into registers, compare them, and act. Only
//! comparisons that provably fail for UDP/4791 on the interface rule it out; any other expression
//! could match.

use std::collections::HashMap;

use crate::ROCE_PORT;
use crate::kernel::interface::Interface;
use crate::kernel::rtnl::query::text;
use crate::kernel::rtnl::socket::Attributes;

/// The place where a rule sees the datagram.
#[derive(Debug, Clone, Copy)]
pub(super) struct Context<'a> {
    /// The input interface, at hooks on receive.
    pub(super) arrives_by: Option<&'a Interface>,
    /// The output interface, at hooks on send.
    pub(super) leaves_by: Option<&'a Interface>,
    /// Addresses of 127.0.0.0/8 are possible.
    pub(super) loopback: bool,
    /// The table sees IPv6 only.
    pub(super) ipv6_only: bool,
}

/// The effect of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Effect {
    /// Nothing: it does not match.
    None,
    Some,
    /// Only go to another chain of its table.
    Jump(String),
}

/// Knowledge of a register's content.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Known {
    Bytes(Vec<u8>),
    /// An IPv4 address that is not in 127.0.0.0/8, from its first byte on.
    NotLoopback,
}

const BASE_NETWORK: u32 = 1;
const BASE_TRANSPORT: u32 = 2;
const META_IIF: u32 = 4;
const META_OIF: u32 = 5;
const META_IIFNAME: u32 = 6;
const META_OIFNAME: u32 = 7;
const META_L4PROTO: u32 = 16;
const CMP_EQ: u32 = 0;
const CMP_NEQ: u32 = 1;
const CMP_LT: u32 = 2;
const CMP_LTE: u32 = 3;
const CMP_GT: u32 = 4;
const CMP_GTE: u32 = 5;
const VERDICT_REGISTER: u32 = 0;
const JUMP: i32 = -3;
const GOTO: i32 = -4;

/// The possible effect on our datagrams of the rule with this list of expressions
/// (`NFTA_RULE_EXPRESSIONS`).
pub(super) fn effect(expressions: &[u8], context: &Context<'_>) -> Effect {
    let mut registers = Registers::default();
    let mut jump = None;
    let mut acts = false;
    for (_, expression) in Attributes(expressions) {
        let (mut name, mut data) = (String::new(), &[][..]);
        for (kind, value) in Attributes(expression) {
            match kind {
                1 => name = text(value),
                2 => data = value,
                _ => {}
            }
        }
        let fields: HashMap<u16, &[u8]> = Attributes(data).collect();
        match name.as_str() {
            // Actions before a failed comparison have taken effect.
            "cmp" | "range" if fails(&name, &fields, &registers) => {
                return if acts { Effect::Some } else { Effect::None };
            }
            "cmp" | "range" => {}
            "meta" | "payload" if fields.contains_key(&sets_of(&name)) => acts = true,
            "meta" | "payload" => load(&name, &fields, context, &mut registers),
            "bitwise" => mask(&fields, &mut registers),
            "immediate" => match verdict(&fields) {
                Some(RuleVerdict::Chain(chain)) => jump = Some(chain),
                Some(RuleVerdict::Other) => acts = true,
                None => registers.clear(),
            },
            // These load a value that we do not follow. They name their register in different ways,
            // so all registers become unknown.
            "ct" | "rt" | "socket" | "fib" | "byteorder" => {
                acts |= fields.contains_key(&sets_of(&name));
                registers.clear();
            }
            _ => acts = true,
        }
    }
    match jump {
        Some(chain) if !acts => Effect::Jump(chain),
        _ => Effect::Some,
    }
}

/// The attribute with which an expression that usually loads a field sets it instead.
fn sets_of(name: &str) -> u16 {
    match name {
        "meta" => 3,    // NFTA_META_SREG
        "ct" => 4,      // NFTA_CT_SREG
        "payload" => 5, // NFTA_PAYLOAD_SREG
        _ => u16::MAX,
    }
}

/// Contents of registers, by the 32-bit register that they begin at, with the number of these that
/// they fill. `NFT_REG_1` to `NFT_REG_4`, of 128 bits, are four of the 32-bit registers each.
#[derive(Default)]
struct Registers(HashMap<u32, (u32, Known)>);

impl Registers {
    const WORD_BYTES: u32 = 4;
    /// The most bytes that one expression loads: a name of an interface, an IPv6 address.
    const LOAD_MAX: u32 = 16;

    /// The 32-bit register with which a register begins: `nft_parse_register` of Linux.
    fn word(register: u32) -> u32 {
        const WORDS: u32 = 4;
        const NFT_REG32_00: u32 = 8;
        if register < NFT_REG32_00 { register * WORDS } else { register - NFT_REG32_00 + WORDS }
    }

    /// The content that begins with a register.
    fn get(&self, register: u32) -> Option<&Known> {
        self.0.get(&Self::word(register)).map(|(_, known)| known)
    }

    /// Replaces the content of a register and of those that `bytes` bytes reach into.
    fn set(&mut self, register: u32, bytes: u32, known: Option<Known>) {
        let words = bytes.div_ceil(Self::WORD_BYTES).max(1);
        let first = Self::word(register);
        let end = first.saturating_add(words);
        self.0.retain(|&at, (words, _)| at >= end || at + *words <= first);
        if let Some(known) = known {
            self.0.insert(first, (words, known));
        }
    }

    /// Forgets everything.
    fn clear(&mut self) {
        self.0.clear();
    }
}

/// `meta` (DREG 1, KEY 2, SREG 3) and `payload` (DREG 1, BASE 2, OFFSET 3, LEN 4, SREG 5).
fn load(
    name: &str,
    fields: &HashMap<u16, &[u8]>,
    context: &Context<'_>,
    registers: &mut Registers,
) {
    let field = |kind: u16| fields.get(&kind).and_then(|value| be32(value));
    let Some(register) = field(1) else { return };
    let interface = |found: Option<&Interface>, by_name: bool| {
        found.map(|iface| {
            let mut bytes = iface.index.to_ne_bytes().to_vec();
            if by_name {
                bytes = iface.name.as_bytes().to_vec();
                bytes.resize(libc::IFNAMSIZ, 0);
            }
            Known::Bytes(bytes)
        })
    };
    let known = if name == "meta" {
        match field(2) {
            Some(META_L4PROTO) => Some(Known::Bytes(vec![libc::IPPROTO_UDP as u8])),
            Some(META_IIF) => interface(context.arrives_by, false),
            Some(META_OIF) => interface(context.leaves_by, false),
            Some(META_IIFNAME) => interface(context.arrives_by, true),
            Some(META_OIFNAME) => interface(context.leaves_by, true),
            _ => None,
        }
    } else {
        match (field(2), field(3), field(4)) {
            (Some(BASE_TRANSPORT), Some(2), Some(2)) => {
                Some(Known::Bytes(ROCE_PORT.to_be_bytes().to_vec()))
            }
            // In the IPv6 header these offsets lie in the middle of the source address, where no
            // load starts.
            (Some(BASE_NETWORK), Some(9), Some(1)) if !context.ipv6_only => {
                Some(Known::Bytes(vec![libc::IPPROTO_UDP as u8]))
            }
            (Some(BASE_NETWORK), Some(12 | 16), Some(1..=4))
                if !context.ipv6_only && !context.loopback =>
            {
                Some(Known::NotLoopback)
            }
            (Some(BASE_NETWORK), Some(6), Some(1)) if context.ipv6_only => {
                Some(Known::Bytes(vec![libc::IPPROTO_UDP as u8]))
            }
            _ => None,
        }
    };
    let bytes = match (name, &known) {
        ("meta", Some(Known::Bytes(bytes))) => bytes.len() as u32,
        ("payload", _) => field(4).unwrap_or(Registers::LOAD_MAX),
        _ => Registers::LOAD_MAX,
    };
    registers.set(register, bytes, known);
}

/// Whether a `cmp` (SREG 1, OP 2, DATA 3) or `range` (SREG 1, OP 2, FROM 3, TO 4) is provably
/// false.
fn fails(name: &str, fields: &HashMap<u16, &[u8]>, registers: &Registers) -> bool {
    let field = |kind: u16| fields.get(&kind).and_then(|value| be32(value));
    let Some(known) = field(1).and_then(|register| registers.get(register)) else { return false };
    let (Some(op), Some(value)) = (field(2), data_value(fields, 3)) else { return false };
    match known {
        Known::NotLoopback => name == "cmp" && op == CMP_EQ && value.first() == Some(&127),
        Known::Bytes(bytes) if name == "cmp" => {
            // A shorter value compares a prefix: that is the encoding of `eth*`.
            let Some(start) = bytes.get(..value.len()) else { return false };
            match op {
                CMP_EQ => start != value,
                CMP_NEQ => start == value,
                CMP_LT => start >= value,
                CMP_LTE => start > value,
                CMP_GT => start <= value,
                CMP_GTE => start < value,
                _ => false,
            }
        }
        Known::Bytes(bytes) => {
            let Some(to) = data_value(fields, 4) else { return false };
            let inside = value.len() == bytes.len() && (value..=to).contains(&&bytes[..]);
            let outside = value.len() == bytes.len() && !inside;
            (op == CMP_EQ && outside) || (op == CMP_NEQ && inside)
        }
    }
}

/// The `NFTA_DATA_VALUE` in an attribute.
fn data_value<'a>(fields: &HashMap<u16, &'a [u8]>, kind: u16) -> Option<&'a [u8]> {
    Attributes(fields.get(&kind)?).find_map(|(kind, value)| (kind == 1).then_some(value))
}

/// `bitwise` (SREG 1, DREG 2, LEN 3, MASK 4, XOR 5). Of the tracked values only a prefix of an
/// address survives it, if the mask keeps the whole first byte and no bit is flipped.
fn mask(fields: &HashMap<u16, &[u8]>, registers: &mut Registers) {
    let field = |kind: u16| fields.get(&kind).and_then(|value| be32(value));
    let bytes = |kind: u16| data_value(fields, kind).unwrap_or(&[]);
    let (Some(from), Some(to)) = (field(1), field(2)) else { return registers.clear() };
    let keeps = bytes(4).first() == Some(&0xff) && bytes(5).iter().all(|b| *b == 0);
    let keeps = keeps && registers.get(from) == Some(&Known::NotLoopback);
    let bytes = field(3).unwrap_or(Registers::LOAD_MAX);
    registers.set(to, bytes, keeps.then_some(Known::NotLoopback));
}

enum RuleVerdict {
    Chain(String),
    Other,
}

/// The verdict of an `immediate` (DREG 1, DATA 2 with VERDICT 2 of CODE 1 and CHAIN 2), if it has
/// one.
fn verdict(fields: &HashMap<u16, &[u8]>) -> Option<RuleVerdict> {
    if fields.get(&1).and_then(|value| be32(value)) != Some(VERDICT_REGISTER) {
        return None;
    }
    let verdict = fields
        .get(&2)
        .and_then(|data| Attributes(data).find_map(|(kind, v)| (kind == 2).then_some(v)));
    let (mut code, mut chain) = (0, None);
    for (kind, value) in Attributes(verdict.unwrap_or(&[])) {
        match kind {
            1 => code = be32(value).unwrap_or(0) as i32,
            2 => chain = Some(text(value)),
            _ => {}
        }
    }
    match (code, chain) {
        (JUMP | GOTO, Some(chain)) => Some(RuleVerdict::Chain(chain)),
        _ => Some(RuleVerdict::Other),
    }
}

/// A 32-bit integer, big-endian as in all of nftables' messages.
pub(super) fn be32(value: &[u8]) -> Option<u32> {
    value.first_chunk().map(|bytes| u32::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = value.len() as u16 + 4;
        let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend_from_slice(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn expression(name: &str, fields: &[(u16, &[u8])]) -> Vec<u8> {
        let fields: Vec<u8> =
            fields.iter().flat_map(|(kind, value)| attribute(*kind, value)).collect();
        let name = attribute(1, &[name.as_bytes(), &[0]].concat());
        attribute(1, &[name, attribute(2, &fields)].concat())
    }

    /// `payload load LEN @ BASE OFFSET => REGISTER`.
    fn load([register, base, offset, len]: [u32; 4]) -> Vec<u8> {
        let [register, base, offset, len] = [register, base, offset, len].map(u32::to_be_bytes);
        expression("payload", &[(1, &register), (2, &base), (3, &offset), (4, &len)])
    }

    /// `cmp eq REGISTER VALUE`.
    fn is(register: u32, value: &[u8]) -> Vec<u8> {
        let value = attribute(1, value);
        let (register, op) = (register.to_be_bytes(), CMP_EQ.to_be_bytes());
        expression("cmp", &[(1, &register), (2, &op), (3, &value)])
    }

    fn effect_of(expressions: &[Vec<u8>]) -> Effect {
        let context =
            Context { arrives_by: None, leaves_by: None, loopback: false, ipv6_only: false };
        effect(&expressions.concat(), &context)
    }

    /// The UDP destination port, and 16 bytes that are not followed.
    const PORT: [u32; 3] = [BASE_TRANSPORT, 2, 2];
    const OTHER: [u32; 3] = [BASE_NETWORK, 8, 16];

    fn to(register: u32, [base, offset, len]: [u32; 3]) -> Vec<u8> {
        load([register, base, offset, len])
    }

    #[test]
    fn a_register_of_128_bits_is_four_of_32() {
        let dns = 53_u16.to_be_bytes();
        for (wide, narrow) in [(1, 8..12), (2, 12..16), (3, 16..20), (4, 20..24)] {
            for register in narrow.clone() {
                assert_eq!(effect_of(&[to(register, PORT), is(register, &dns)]), Effect::None);
                // A value loaded over it, in part or as a whole, is not known to be the port.
                let over = [to(register, PORT), to(wide, OTHER), is(register, &dns)];
                assert_eq!(effect_of(&over), Effect::Some, "{register} after {wide}");
                let beside = [to(register, PORT), to(wide % 4 + 1, OTHER), is(register, &dns)];
                assert_eq!(effect_of(&beside), Effect::None, "{register} beside {wide}");
            }
            let first = narrow.start;
            assert_eq!(effect_of(&[to(wide, PORT), is(first, &dns)]), Effect::None, "one register");
            let over = [to(wide, PORT), to(first, OTHER), is(wide, &dns)];
            assert_eq!(effect_of(&over), Effect::Some, "{wide} after {first}");
            let beside = [to(wide, PORT), to(first + 1, OTHER), is(wide, &dns)];
            assert_eq!(effect_of(&beside), Effect::None, "{wide} beside {first}");
        }
    }

    #[test]
    fn a_load_reaches_into_the_registers_behind() {
        let dns = 53_u16.to_be_bytes();
        for (len, registers) in [(1, 1), (4, 1), (5, 2), (16, 4)] {
            for behind in 0..6 {
                let long = load([8, BASE_NETWORK, 8, len]);
                let rule = [to(8 + behind, PORT), long, is(8 + behind, &dns)];
                let known = behind >= registers;
                let expected = if known { Effect::None } else { Effect::Some };
                assert_eq!(effect_of(&rule), expected, "{len} bytes, {behind} behind");
            }
        }
    }
}
