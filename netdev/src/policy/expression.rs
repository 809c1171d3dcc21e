//! Whether an nftables rule could affect a RoCEv2 datagram.
//!
//! A rule is a list of expressions that load fields into registers, compare them, and act. Only
//! comparisons that provably fail for UDP/4791 on the interface rule it out; any other expression
//! could match.

use std::collections::HashMap;

use super::nft::{be32, text};
use crate::iface::Interface;
use crate::port::ROCE_PORT;
use crate::rtnl::socket::Attributes;

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
    /// Something.
    Some,
    /// Only go to another chain of its table.
    Jump(String),
}

/// Knowledge of a register's content.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Known {
    /// It has these bytes.
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
    let mut registers = HashMap::new();
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
                Some(Verdict::Chain(chain)) => jump = Some(chain),
                Some(Verdict::Other) => acts = true,
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

type Registers = HashMap<u32, Known>;

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
    match known {
        Some(known) => registers.insert(register, known),
        None => registers.remove(&register),
    };
}

/// Whether a `cmp` (SREG 1, OP 2, DATA 3) or `range` (SREG 1, OP 2, FROM 3, TO 4) is provably
/// false.
fn fails(name: &str, fields: &HashMap<u16, &[u8]>, registers: &Registers) -> bool {
    let field = |kind: u16| fields.get(&kind).and_then(|value| be32(value));
    let Some(known) = field(1).and_then(|register| registers.get(&register)) else { return false };
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
    match registers.get(&from) {
        Some(Known::NotLoopback) if keeps => registers.insert(to, Known::NotLoopback),
        _ => registers.remove(&to),
    };
}

enum Verdict {
    Chain(String),
    Other,
}

/// The verdict of an `immediate` (DREG 1, DATA 2 with VERDICT 2 of CODE 1 and CHAIN 2), if it has
/// one.
fn verdict(fields: &HashMap<u16, &[u8]>) -> Option<Verdict> {
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
        (JUMP | GOTO, Some(chain)) => Some(Verdict::Chain(chain)),
        _ => Some(Verdict::Other),
    }
}
