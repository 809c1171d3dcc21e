//! The program against forged senders: frames of a container carry its own addresses only.
//!
//! It runs at the tcx ingress of the host's end of a veth. A frame goes on (`TCX_NEXT`, so that
//! other programs and shapers see it) if all of this holds:
//! - it has no VLAN tag, and its EtherType is that of IPv4, IPv6 or ARP;
//! - its Ethernet source is the container's;
//! - its IP source, or the sender of an ARP message, is the container's;
//! - a message of neighbour discovery names only the container's Ethernet address, an advertisement
//!   is of an address of the container, and none is of a router.
//!
//! Datagrams to the port of RoCEv2 are dropped if the address is [`CLOSED`] to it.
//!
//! "No address" is a source where the protocols have it so: a client's DHCP to the broadcast
//! address, a probe of ARP, and IPv6 before an address is known unique. The rest is dropped and
//! counted by [`Reason`].
//!
//! The key of the map of the container's addresses is an address with the Ethernet address, so that
//! both change at once. A key of another kind has the Ethernet address alone.

use std::net::IpAddr;

use rocinante_netdev::for_agent::bpf::asm::{Asm, Cond, Helper, Insn, Label, Reg, Size, net_u16};
use rocinante_netdev::for_agent::bpf::{Map, TCX_DROP, TCX_NEXT};

use super::filter::Reason;

/// Bytes of a key: an IPv6 or IPv4-mapped address, the Ethernet address, the kind, and a zero.
pub(super) const KEY_LEN: usize = 24;
// The kinds of keys. An IPv6 source that is an IPv4-mapped address is not the IPv4 address.
const OF_V6: i32 = 0;
const MAC_ALONE: i32 = 1;
const OF_V4: i32 = 2;

/// The values of keys: whether frames of the address may be RoCEv2.
pub(super) const OPEN: u32 = 1;
pub(super) const CLOSED: u32 = 2;
/// The port of RoCEv2.
const ROCE: u16 = 4791;

/// Offset of `vlan_present` in `struct __sk_buff`. The kernel takes a tag out of the frame.
const CTX_VLAN_PRESENT: i16 = 20;

/// Where the program copies the headers to. The IP header, at 14, is aligned.
const FRAME: i16 = -126;
const ETH_SRC: i16 = FRAME + 6;
const ETH_TYPE: i16 = FRAME + 12;
const IP: i16 = FRAME + 14;
const ETH_LEN: i32 = 14;
const ARP_LEN: i32 = 28;
const V4_LEN: i32 = 20;
const V6_LEN: i32 = 40;
/// Where it copies the headers behind that of IPv6 to.
const NEXT: i16 = -64;
/// Where it notes that the frame is the first of fragments.
const FRAGMENTED: i16 = -32;
/// Where it notes the value of the source of IPv6.
const VALUE: i16 = -28;
/// Where it builds keys: the bytes below the frame pointer.
const KEY: i16 = -(KEY_LEN as i16);
const KEY_MAC: i16 = KEY + 16;
const KEY_KIND: i16 = KEY + 22;

/// In the first byte of the flags and the fragment offset of IPv4.
const DONT_FRAGMENT: u32 = 0x40;
const DHCP_CLIENT: u16 = 68;
const DHCP_SERVER: u16 = 67;

// Of IPv6: the headers that may stand before that of ICMPv6, and ICMPv6.
const HOP_BY_HOP: u32 = 0;
const ROUTING: u32 = 43;
const FRAGMENT: u32 = 44;
const AUTHENTICATION: u32 = 51;
const ICMP_V6: u32 = 58;
const DESTINATION_OPTIONS: u32 = 60;
/// The most headers that are followed; a frame with more is dropped.
const HEADERS_MAX: usize = 6;

// Of neighbour discovery (RFC 4861).
const ROUTER_SOLICITATION: u32 = 133;
const ROUTER_ADVERTISEMENT: u32 = 134;
const NEIGHBOUR_SOLICITATION: u32 = 135;
const NEIGHBOUR_ADVERTISEMENT: u32 = 136;
const REDIRECT: u32 = 137;
/// The shortest ICMPv6 message; options follow a router solicitation there.
const ICMP_LEN: i32 = 8;
/// Length of the messages that have a target: options follow.
const TARGETED_LEN: i32 = 24;
const SOURCE_LINK_ADDRESS: u32 = 1;
const TARGET_LINK_ADDRESS: u32 = 2;
/// The most options that are read; a message with more is dropped.
const OPTIONS_MAX: usize = 8;

const UDP: u32 = 17;

/// The map's key of an address at this Ethernet address.
pub(super) fn key(address: IpAddr, mac: [u8; 6]) -> [u8; KEY_LEN] {
    let mut key = mac_key(mac);
    key[..16].copy_from_slice(&match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    });
    key[22] = if address.is_ipv4() { OF_V4 } else { OF_V6 } as u8;
    key
}

/// The map's key of an Ethernet address alone.
pub(super) fn mac_key(mac: [u8; 6]) -> [u8; KEY_LEN] {
    let mut key = [0; KEY_LEN];
    key[16..22].copy_from_slice(&mac);
    key[22] = MAC_ALONE as u8;
    key
}

/// The address, if it is not the key of an Ethernet address alone, and the Ethernet address.
pub(super) fn parse_key(key: &[u8]) -> Option<(Option<IpAddr>, [u8; 6])> {
    let key: &[u8; KEY_LEN] = key.try_into().ok()?;
    let address = std::net::Ipv6Addr::from(*key.first_chunk::<16>()?);
    let address = match i32::from(key[22]) {
        OF_V4 => Some(address.to_ipv4_mapped()?.into()),
        OF_V6 => Some(address.into()),
        MAC_ALONE => None,
        _ => return None,
    };
    Some((address, key[16..22].try_into().ok()?))
}

/// The labels that the parts of the program share.
struct Ends {
    /// The frame goes on.
    next: Label,
    /// It goes on if the Ethernet source is the container's.
    next_if_mac: Label,
    /// Counts the reason in R7, or a foreign Ethernet source if that is the reason, and drops.
    foreign: Label,
    /// Counts the reason in R7 and drops.
    drop: Label,
    /// Counts as malformed and drops.
    malformed: Label,
}

/// Assembles the program. R6 is the context. R7 is the reason of a drop, except while headers of
/// IPv6 are followed: there it is the next header, R8 whether the source is no address, and R9 the
/// offset.
pub(super) fn program(own: &Map, dropped: &Map) -> Vec<Insn> {
    use Reg::{R0, R1, R2, R5, R6, R7, R10};
    let mut asm = Asm::default();
    let [next, next_if_mac, foreign, drop, malformed] = [(); 5].map(|()| asm.label());
    let ends = Ends { next, next_if_mac, foreign, drop, malformed };
    let [v4, arp, no_mac] = [(); 3].map(|()| asm.label());

    asm.mov(R6, R1);
    copy(&mut asm, 0, FRAME, ETH_LEN, malformed);
    asm.mov_imm(R7, Reason::EtherType as i32);
    asm.load(Size::W, R5, R6, CTX_VLAN_PRESENT);
    asm.jump32_if_imm(Cond::Ne, R5, 0, foreign);
    asm.load(Size::H, R5, R10, ETH_TYPE);
    asm.jump32_if_imm(Cond::Eq, R5, net_u16(0x0800), v4);
    asm.jump32_if_imm(Cond::Eq, R5, net_u16(0x0806), arp);
    asm.jump32_if_imm(Cond::Ne, R5, net_u16(0x86dd), foreign);
    ipv6(&mut asm, own, &ends);
    asm.bind(v4);
    ipv4(&mut asm, own, &ends);
    asm.bind(arp);
    address_resolution(&mut asm, own, &ends);

    asm.bind(next_if_mac);
    mac_to_key(&mut asm, MAC_ALONE);
    zero_address(&mut asm);
    lookup(&mut asm, own);
    asm.jump_if_imm(Cond::Eq, R0, 0, no_mac);
    asm.bind(next);
    asm.mov_imm(R0, TCX_NEXT);
    asm.exit();

    asm.bind(malformed);
    asm.mov_imm(R7, Reason::Malformed as i32);
    asm.jump(drop);
    asm.bind(foreign);
    mac_to_key(&mut asm, MAC_ALONE);
    zero_address(&mut asm);
    lookup(&mut asm, own);
    asm.jump_if_imm(Cond::Ne, R0, 0, drop);
    asm.bind(no_mac);
    asm.mov_imm(R7, Reason::EthernetSource as i32);
    asm.bind(drop);
    asm.store(Size::W, R10, KEY, R7);
    asm.load_map(R1, dropped.raw_fd());
    asm.mov(R2, R10);
    asm.add_imm(R2, i32::from(KEY));
    asm.call(Helper::MapLookupElem);
    let out = asm.label();
    asm.jump_if_imm(Cond::Eq, R0, 0, out);
    asm.mov_imm(R1, 1);
    asm.atomic_add(R0, 0, R1);
    asm.bind(out);
    asm.mov_imm(R0, TCX_DROP);
    asm.exit();
    asm.assemble()
}

fn ipv4(asm: &mut Asm, own: &Map, ends: &Ends) {
    use Reg::{R0, R5, R7, R9, R10};
    let [unspecified, whole] = [(); 2].map(|()| asm.label());
    copy(asm, ETH_LEN, IP, V4_LEN, ends.malformed);
    asm.load(Size::B, R5, R10, IP);
    asm.shift_right_imm(R5, 4);
    asm.jump32_if_imm(Cond::Ne, R5, 4, ends.malformed);
    asm.mov_imm(R7, Reason::Ipv4 as i32);
    asm.load(Size::W, R5, R10, IP + 12);
    asm.jump32_if_imm(Cond::Eq, R5, 0, unspecified);
    asm.store(Size::W, R10, KEY + 12, R5);
    v4_mapped(asm);
    mac_to_key(asm, OF_V4);
    lookup(asm, own);
    asm.jump_if_imm(Cond::Eq, R0, 0, ends.foreign);
    asm.load(Size::W, R5, R0, 0);
    asm.jump32_if_imm(Cond::Ne, R5, CLOSED, ends.next);
    asm.load(Size::B, R5, R10, IP + 9);
    asm.jump32_if_imm(Cond::Ne, R5, UDP, ends.next);
    // A later fragment: the first is judged.
    asm.load(Size::H, R5, R10, IP + 6);
    asm.jump32_if_imm(Cond::Set, R5, net_u16(0x1fff), ends.next);
    asm.load(Size::B, R9, R10, IP);
    asm.and_imm(R9, 0xf);
    asm.shift_left_imm(R9, 2);
    asm.add_imm(R9, ETH_LEN);
    roce(asm, ends.next, ends);
    // A client's DHCP, whole and without options of IP.
    asm.bind(unspecified);
    asm.load(Size::W, R5, R10, IP + 16);
    asm.jump32_if_imm(Cond::Ne, R5, u32::MAX, ends.foreign);
    asm.load(Size::B, R5, R10, IP + 9);
    asm.jump32_if_imm(Cond::Ne, R5, UDP, ends.foreign);
    asm.load(Size::B, R5, R10, IP);
    asm.jump32_if_imm(Cond::Ne, R5, 0x45, ends.foreign);
    asm.load(Size::B, R5, R10, IP + 7);
    asm.jump32_if_imm(Cond::Ne, R5, 0, ends.foreign);
    asm.load(Size::B, R5, R10, IP + 6);
    asm.jump32_if_imm(Cond::Eq, R5, 0, whole);
    asm.jump32_if_imm(Cond::Ne, R5, DONT_FRAGMENT, ends.foreign);
    asm.bind(whole);
    copy(asm, ETH_LEN + V4_LEN, NEXT, 4, ends.malformed);
    for (at, port) in [(0, DHCP_CLIENT), (2, DHCP_SERVER)] {
        asm.load(Size::H, R5, R10, NEXT + at);
        asm.jump32_if_imm(Cond::Ne, R5, net_u16(port), ends.foreign);
    }
    asm.jump(ends.next_if_mac);
}

fn address_resolution(asm: &mut Asm, own: &Map, ends: &Ends) {
    use Reg::{R0, R4, R5, R7, R10};
    copy(asm, ETH_LEN, IP, ARP_LEN, ends.malformed);
    // Addresses of Ethernet and IPv4, with their lengths.
    for (offset, value) in [(0, 1), (2, 0x0800), (4, 0x0604)] {
        asm.load(Size::H, R5, R10, IP + offset);
        asm.jump32_if_imm(Cond::Ne, R5, net_u16(value), ends.malformed);
    }
    asm.mov_imm(R7, Reason::Arp as i32);
    for half in [0, 2, 4] {
        asm.load(Size::H, R5, R10, IP + 8 + half);
        asm.load(Size::H, R4, R10, ETH_SRC + half);
        asm.jump_if(Cond::Ne, R5, R4, ends.foreign);
    }
    asm.load(Size::H, R4, R10, IP + 14);
    asm.store(Size::H, R10, KEY + 12, R4);
    asm.load(Size::H, R5, R10, IP + 16);
    asm.store(Size::H, R10, KEY + 14, R5);
    asm.or(R5, R4);
    // A probe.
    asm.jump32_if_imm(Cond::Eq, R5, 0, ends.next_if_mac);
    v4_mapped(asm);
    mac_to_key(asm, OF_V4);
    lookup(asm, own);
    asm.jump_if_imm(Cond::Eq, R0, 0, ends.foreign);
    asm.jump(ends.next);
}

fn ipv6(asm: &mut Asm, own: &Map, ends: &Ends) {
    use Reg::{R0, R4, R5, R7, R8, R9, R10};
    let [specified, headers] = [(); 2].map(|()| asm.label());
    copy(asm, ETH_LEN, IP, V6_LEN, ends.malformed);
    asm.load(Size::B, R5, R10, IP);
    asm.shift_right_imm(R5, 4);
    asm.jump32_if_imm(Cond::Ne, R5, 6, ends.malformed);
    asm.mov_imm(R7, Reason::Ipv6 as i32);
    asm.mov_imm(R4, 0);
    for word in [0, 4, 8, 12] {
        asm.load(Size::W, R5, R10, IP + 8 + word);
        asm.store(Size::W, R10, KEY + word, R5);
        asm.or(R4, R5);
    }
    asm.mov_imm(R8, 0);
    asm.jump_if_imm(Cond::Ne, R4, 0, specified);
    // Without an address: to a group of the link.
    asm.load(Size::H, R5, R10, IP + 24);
    asm.jump32_if_imm(Cond::Ne, R5, net_u16(0xff02), ends.foreign);
    asm.mov_imm(R8, 1);
    mac_to_key(asm, MAC_ALONE);
    asm.jump(headers);
    asm.bind(specified);
    mac_to_key(asm, OF_V6);
    asm.bind(headers);
    lookup(asm, own);
    asm.jump_if_imm(Cond::Eq, R0, 0, ends.foreign);
    asm.load(Size::W, R5, R0, 0);
    asm.store(Size::W, R10, VALUE, R5);
    asm.load(Size::B, R7, R10, IP + 6);
    asm.mov_imm(R9, ETH_LEN + V6_LEN);
    asm.store_imm(Size::B, R10, FRAGMENTED, 0);
    let icmp = asm.label();
    follow_headers(asm, icmp, ends);
    asm.bind(icmp);
    neighbour_discovery(asm, own, ends);
}

/// Follows the headers behind that of IPv6 to ICMPv6. Anything else goes on, if the source is an
/// address that is open to it.
fn follow_headers(asm: &mut Asm, icmp: Label, ends: &Ends) {
    use Reg::{R1, R5, R7, R8, R9, R10};
    let [other, judged] = [(); 2].map(|()| asm.label());
    for _ in 0..HEADERS_MAX {
        let [options, authentication, fragment, longer, again] = [(); 5].map(|()| asm.label());
        asm.jump32_if_imm(Cond::Eq, R7, ICMP_V6, icmp);
        for header in [HOP_BY_HOP, ROUTING, DESTINATION_OPTIONS] {
            asm.jump32_if_imm(Cond::Eq, R7, header, options);
        }
        asm.jump32_if_imm(Cond::Eq, R7, FRAGMENT, fragment);
        asm.jump32_if_imm(Cond::Eq, R7, AUTHENTICATION, authentication);
        asm.jump(other);

        asm.bind(fragment);
        copy_at(asm, NEXT, 8, ends.malformed);
        asm.store_imm(Size::B, R10, FRAGMENTED, 1);
        asm.load(Size::B, R7, R10, NEXT);
        asm.add_imm(R9, 8);
        asm.load(Size::H, R5, R10, NEXT + 2);
        // A later one: its first is judged for all.
        asm.jump32_if_imm(Cond::Set, R5, net_u16(0xfff8), judged);
        asm.jump(again);

        asm.bind(authentication);
        copy_at(asm, NEXT, 8, ends.malformed);
        asm.load(Size::B, R1, R10, NEXT + 1);
        asm.shift_left_imm(R1, 2);
        asm.jump(longer);
        asm.bind(options);
        copy_at(asm, NEXT, 8, ends.malformed);
        asm.load(Size::B, R1, R10, NEXT + 1);
        asm.shift_left_imm(R1, 3);
        asm.bind(longer);
        asm.load(Size::B, R7, R10, NEXT);
        asm.add_imm(R9, 8);
        asm.add(R9, R1);
        asm.bind(again);
    }
    asm.jump32_if_imm(Cond::Eq, R7, ICMP_V6, icmp);
    for header in [HOP_BY_HOP, ROUTING, DESTINATION_OPTIONS, FRAGMENT, AUTHENTICATION] {
        asm.jump32_if_imm(Cond::Eq, R7, header, ends.malformed);
    }
    asm.bind(other);
    asm.load(Size::W, R5, R10, VALUE);
    asm.jump32_if_imm(Cond::Ne, R5, CLOSED, judged);
    asm.jump32_if_imm(Cond::Ne, R7, UDP, judged);
    roce(asm, judged, ends);
    asm.bind(judged);
    asm.mov_imm(R7, Reason::Ipv6 as i32);
    asm.jump_if_imm(Cond::Ne, R8, 0, ends.drop);
    asm.jump(ends.next);
}

/// Drops a datagram, whose header is at offset R9, to the port of RoCEv2; others go to `other`.
fn roce(asm: &mut Asm, other: Label, ends: &Ends) {
    use Reg::{R5, R7, R10};
    copy_at(asm, NEXT, 4, ends.malformed);
    asm.load(Size::H, R5, R10, NEXT + 2);
    asm.jump32_if_imm(Cond::Ne, R5, net_u16(ROCE), other);
    asm.mov_imm(R7, Reason::Unclaimed as i32);
    asm.jump(ends.drop);
}

/// Judges the ICMPv6 message at offset R9.
fn neighbour_discovery(asm: &mut Asm, own: &Map, ends: &Ends) {
    use Reg::{R0, R5, R7, R8, R9, R10};
    let [solicitation, router, own_target, target_options] = [(); 4].map(|()| asm.label());
    let whole = asm.label();
    copy_at(asm, NEXT, ICMP_LEN, ends.malformed);
    asm.mov_imm(R7, Reason::NeighbourDiscovery as i32);
    asm.load(Size::B, R5, R10, NEXT);
    for forged in [ROUTER_ADVERTISEMENT, REDIRECT] {
        asm.jump32_if_imm(Cond::Eq, R5, forged, ends.drop);
    }
    for judged in [ROUTER_SOLICITATION, NEIGHBOUR_SOLICITATION, NEIGHBOUR_ADVERTISEMENT] {
        asm.jump32_if_imm(Cond::Eq, R5, judged, whole);
    }
    asm.jump(ends.next);
    // RFC 6980: none of them is fragmented.
    asm.bind(whole);
    asm.load(Size::B, R0, R10, FRAGMENTED);
    asm.jump_if_imm(Cond::Ne, R0, 0, ends.drop);
    asm.jump32_if_imm(Cond::Eq, R5, ROUTER_SOLICITATION, router);
    asm.jump32_if_imm(Cond::Eq, R5, NEIGHBOUR_SOLICITATION, solicitation);
    asm.jump_if_imm(Cond::Ne, R8, 0, ends.drop);
    asm.jump(own_target);
    // A solicitation asks for another's address. Without a source it claims one.
    asm.bind(solicitation);
    asm.jump_if_imm(Cond::Eq, R8, 0, target_options);
    asm.bind(own_target);
    copy_at(asm, NEXT, TARGETED_LEN, ends.malformed);
    for word in [0, 4, 8, 12] {
        asm.load(Size::W, R5, R10, NEXT + 8 + word);
        asm.store(Size::W, R10, KEY + word, R5);
    }
    mac_to_key(asm, OF_V6);
    lookup(asm, own);
    asm.jump_if_imm(Cond::Eq, R0, 0, ends.drop);
    asm.bind(target_options);
    asm.add_imm(R9, TARGETED_LEN - ICMP_LEN);
    asm.bind(router);
    asm.add_imm(R9, ICMP_LEN);
    options(asm, ends);
}

/// Judges the options at offset R9: an Ethernet address among them is the frame's source.
fn options(asm: &mut Asm, ends: &Ends) {
    use Reg::{R1, R4, R5, R9, R10};
    for _ in 0..OPTIONS_MAX {
        let [link_address, other] = [(); 2].map(|()| asm.label());
        copy_at(asm, NEXT, 8, ends.next);
        asm.load(Size::B, R1, R10, NEXT + 1);
        // Everything discards a message with an option of no length.
        asm.jump32_if_imm(Cond::Eq, R1, 0, ends.drop);
        asm.load(Size::B, R5, R10, NEXT);
        asm.jump32_if_imm(Cond::Eq, R5, SOURCE_LINK_ADDRESS, link_address);
        asm.jump32_if_imm(Cond::Ne, R5, TARGET_LINK_ADDRESS, other);
        asm.bind(link_address);
        for half in [0, 2, 4] {
            asm.load(Size::H, R5, R10, NEXT + 2 + half);
            asm.load(Size::H, R4, R10, ETH_SRC + half);
            asm.jump_if(Cond::Ne, R5, R4, ends.drop);
        }
        asm.bind(other);
        asm.shift_left_imm(R1, 3);
        asm.add(R9, R1);
    }
    copy_at(asm, NEXT, 8, ends.next);
    asm.jump(ends.drop);
}

/// Copies `len` bytes at `offset` of the packet (R6) to the stack. Jumps to `short` if it has
/// fewer.
fn copy(asm: &mut Asm, offset: i32, to: i16, len: i32, short: Label) {
    asm.mov_imm(Reg::R2, offset);
    asm.copy_packet(to, len, short);
}

/// As [`copy`], at offset R9.
fn copy_at(asm: &mut Asm, to: i16, len: i32, short: Label) {
    asm.mov(Reg::R2, Reg::R9);
    asm.copy_packet(to, len, short);
}

/// Looks the key up; R0 is 0 if it is not there.
fn lookup(asm: &mut Asm, own: &Map) {
    asm.load_map(Reg::R1, own.raw_fd());
    asm.mov(Reg::R2, Reg::R10);
    asm.add_imm(Reg::R2, i32::from(KEY));
    asm.call(Helper::MapLookupElem);
}

/// Puts the Ethernet source into the key.
fn mac_to_key(asm: &mut Asm, kind: i32) {
    asm.load(Size::W, Reg::R5, Reg::R10, ETH_SRC);
    asm.store(Size::W, Reg::R10, KEY_MAC, Reg::R5);
    asm.load(Size::H, Reg::R5, Reg::R10, ETH_SRC + 4);
    asm.store(Size::H, Reg::R10, KEY_MAC + 4, Reg::R5);
    asm.store_imm(Size::B, Reg::R10, KEY_KIND, kind);
    asm.store_imm(Size::B, Reg::R10, KEY_KIND + 1, 0);
}

/// Puts no address into the key.
fn zero_address(asm: &mut Asm) {
    for word in [0, 4, 8, 12] {
        asm.store_imm(Size::W, Reg::R10, KEY + word, 0);
    }
}

/// Puts the prefix of a mapped IPv4 address into the key.
fn v4_mapped(asm: &mut Asm) {
    asm.store_imm(Size::W, Reg::R10, KEY, 0);
    asm.store_imm(Size::W, Reg::R10, KEY + 4, 0);
    let mapped = u32::from_ne_bytes([0, 0, 0xff, 0xff]);
    asm.store_imm(Size::W, Reg::R10, KEY + 8, mapped.cast_signed());
}
