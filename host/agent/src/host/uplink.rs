//! Shares of an uplink: an htb at its root with a class for each container that has one, and a
//! program at its tcx egress that gives each frame the class of its source address. The program
//! shows that the htb is ours.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

use rocinante_netdev::for_agent::bpf::asm::{Asm, Cond, Helper, Insn, Reg, Size, net_u16};
use rocinante_netdev::for_agent::bpf::{Map, Program, TCX_NEXT};
use rocinante_netdev::for_agent::rtnl::query::{Query, word};

use super::gate::{described, or_gone};
use super::shaper::{
    BURST_MS, CREATE, Done, HANDLE, LINK_LAYER_ETHERNET, QUEUE_MS, ROOT, RTM_NEWQDISC, Root,
    Shaper, ShaperError, TCA_KIND, TCA_OPTIONS, burst_of, kernel, short, tc_header, ticks,
};
use crate::rate::Rate;

const RTM_NEWTCLASS: u16 = 40;
const RTM_DELTCLASS: u16 = 41;
const RTM_GETTCLASS: u16 = 42;
// Of `linux/pkt_sched.h`.
const HTB_PARAMETERS: u16 = 1;
const HTB_INIT: u16 = 2;
const HTB_RATE64: u16 = 6;
const HTB_CEIL64: u16 = 7;
const HTB_VERSION: u32 = 3;
/// Bytes that a class sends in its turn: a super-packet.
const QUANTUM: u32 = 64 << 10;

const HTB: &str = "htb";
/// The classes: of the whole link, of frames that are no container's, and the first of containers.
const WHOLE: u32 = HANDLE | 1;
const REST: u32 = HANDLE | 2;
const FIRST: u32 = HANDLE | 0x10;
const CLASSES_MAX: u32 = 0xff00;

/// Names of the program and its map, by which an agent knows its own.
const PROGRAM: &str = "roce_shares";
const CLASS_OF: &str = "roce_class_of";
/// Bytes of a key: an address, and its family.
const KEY_LEN: usize = 20;
const ADDRESSES_MAX: u32 = 65_536;

/// The share of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Portion {
    /// The index of its end on the host.
    pub end: u32,
    /// The rate that is reserved for it.
    pub rate: Rate,
    /// The rate that it gets at most.
    pub ceil: Rate,
    /// The addresses that it sends from.
    pub addresses: BTreeSet<IpAddr>,
}

impl Shaper {
    /// Shares a link among these, and others that get the rest. May be called again. Error: another
    /// root discipline is there, and stays; or the kernel's.
    pub fn share(
        &mut self,
        link: u32,
        name: &str,
        carries: Rate,
        portions: &[Portion],
    ) -> Done<()> {
        let root = self.root(link).map_err(kernel("list queueing disciplines"))?;
        let sorter = Sorter::find(link).map_err(kernel("list tcx programs"))?;
        let is_new = root.is_none();
        match root {
            Some(Root { kind, handle, .. })
                if sorter.is_none() || (kind.as_str(), handle) != (HTB, HANDLE) =>
            {
                let what = format!("{kind} {:x}: at the root of {name}", handle >> 16);
                return Err(ShaperError::Foreign(what));
            }
            _ => {}
        }
        let sorter = match sorter {
            Some(sorter) => sorter,
            None => Sorter::attach(link).map_err(kernel("put a program at tcx"))?,
        };
        if is_new && let Err(error) = self.make_htb(link) {
            let _ = sorter.detach(link);
            return Err(ShaperError::Kernel("set an htb (CONFIG_NET_SCH_HTB)", error));
        }
        self.classes(link, &sorter, carries, portions).map_err(kernel("set classes of an htb"))
    }

    /// Takes an htb of ours off a link, which may have gone. Returns whether one was there. Error:
    /// the kernel's.
    pub fn unshare(&mut self, link: u32) -> io::Result<bool> {
        let Some(sorter) = Sorter::find(link)? else { return Ok(false) };
        self.remove_root(link, HTB)?;
        sorter.detach(link)?;
        Ok(true)
    }

    fn classes(
        &mut self,
        link: u32,
        sorter: &Sorter,
        carries: Rate,
        portions: &[Portion],
    ) -> io::Result<()> {
        let classes = by_class(portions);
        let class_of = classes.iter().flat_map(|(class, portion)| {
            portion.addresses.iter().map(|address| (key(*address), *class))
        });
        let class_of = class_of.collect();
        self.set_class(link, ROOT_OF_ALL, WHOLE, (carries, carries))?;
        let rest = carries.without(portions.iter().map(|portion| portion.rate));
        self.set_class(link, WHOLE, REST, (rest, carries))?;
        for (class, portion) in &classes {
            self.set_class(link, WHOLE, *class, (portion.rate, portion.ceil.min(carries)))?;
        }
        sorter.sort(&class_of)?;
        for class in self.class_list(link)? {
            if class >= FIRST && !classes.contains_key(&class) {
                let query = Query::new(&tc_header(link, class, 0));
                self.socket.request_one(RTM_DELTCLASS, 0, query.bytes(), &mut |_, _| {})?;
            }
        }
        Ok(())
    }

    fn make_htb(&mut self, link: u32) -> io::Result<()> {
        // `struct tc_htb_glob`: version, quantum of a rate, the class of the rest, and two of none.
        let mut all = [0; 20];
        all[..4].copy_from_slice(&HTB_VERSION.to_ne_bytes());
        all[4..8].copy_from_slice(&10_u32.to_ne_bytes());
        all[8..12].copy_from_slice(&(REST & 0xffff).to_ne_bytes());
        let options = Query::new(&[]).attribute(HTB_INIT, &all);
        let query = Query::new(&tc_header(link, HANDLE, ROOT));
        let query = query.attribute(TCA_KIND, b"htb\0").attribute(TCA_OPTIONS, options.bytes());
        self.socket.request_one(RTM_NEWQDISC, CREATE, query.bytes(), &mut |_, _| {})
    }

    /// Makes or changes a class.
    fn set_class(
        &mut self,
        link: u32,
        parent: u32,
        class: u32,
        (rate, ceil): (Rate, Rate),
    ) -> io::Result<()> {
        let bursts = [rate, ceil].map(|rate| burst_of(rate, BURST_MS, None));
        // `struct tc_htb_opt`: two of `struct tc_ratespec`, two buffers, the quantum, and two of
        // none.
        let mut parameters = [0; 44];
        for (nth, rate) in [rate, ceil].into_iter().enumerate() {
            parameters[12 * nth + 1] = LINK_LAYER_ETHERNET;
            parameters[12 * nth + 8..12 * nth + 12].copy_from_slice(&short(rate.bytes()));
            let buffer = short(ticks(bursts[nth], rate));
            parameters[24 + 4 * nth..28 + 4 * nth].copy_from_slice(&buffer);
        }
        parameters[32..36].copy_from_slice(&QUANTUM.to_ne_bytes());
        let options = Query::new(&[])
            .attribute(HTB_PARAMETERS, &parameters)
            .attribute(HTB_RATE64, &rate.bytes().to_ne_bytes())
            .attribute(HTB_CEIL64, &ceil.bytes().to_ne_bytes());
        let query = Query::new(&tc_header(link, class, parent));
        let query = query.attribute(TCA_KIND, b"htb\0").attribute(TCA_OPTIONS, options.bytes());
        self.socket.request_one(RTM_NEWTCLASS, CREATE, query.bytes(), &mut |_, _| {})?;
        if class == WHOLE {
            return Ok(());
        }
        // Of the frames that wait there.
        let limit = bursts[1] + ceil.bytes() * QUEUE_MS / 1000;
        let query = Query::new(&tc_header(link, 0, class));
        let query = query.attribute(TCA_KIND, b"bfifo\0").attribute(TCA_OPTIONS, &short(limit));
        let flags = CREATE | libc::NLM_F_REPLACE as u16;
        self.socket.request_one(RTM_NEWQDISC, flags, query.bytes(), &mut |_, _| {})
    }

    fn class_list(&mut self, link: u32) -> io::Result<BTreeSet<u32>> {
        let mut classes = BTreeSet::new();
        let query = Query::new(&tc_header(link, 0, 0));
        self.socket.request(RTM_GETTCLASS, true, query.bytes(), &mut |kind, body| {
            if kind == RTM_NEWTCLASS && body.get(4..8) == Some(&link.to_ne_bytes()) {
                classes.extend(body.get(8..12).and_then(word));
            }
        })?;
        Ok(classes)
    }
}

/// The portions by their classes: that of a container is the one of its end's number, or the next.
fn by_class(portions: &[Portion]) -> BTreeMap<u32, &Portion> {
    let mut classes = BTreeMap::new();
    for portion in portions {
        let mut number = portion.end % CLASSES_MAX;
        while classes.contains_key(&(FIRST + number)) {
            number = (number + 1) % CLASSES_MAX;
        }
        classes.insert(FIRST + number, portion);
    }
    classes
}

/// The parent of the class of the whole link.
const ROOT_OF_ALL: u32 = HANDLE;

/// The program at an uplink.
#[derive(Debug)]
struct Sorter {
    program: Program,
    class_of: Map,
}

impl Sorter {
    fn attach(link: u32) -> io::Result<Self> {
        let class_of = Map::hash(CLASS_OF, KEY_LEN, ADDRESSES_MAX)?;
        let program = Program::load_classifier(PROGRAM, &code(&class_of))?;
        program.attach_egress(link)?;
        Ok(Self { program, class_of })
    }

    /// The program of ours at a link; none where the kernel has no tcx.
    fn find(link: u32) -> io::Result<Option<Self>> {
        let is_ours = |(name, map): &(String, Map)| name == CLASS_OF && map.has_sizes(KEY_LEN, 4);
        let all = described(Program::at_egress(link))?.into_iter();
        let mut ours = all.filter(|(_, it)| it.name == PROGRAM).filter_map(|(program, it)| {
            let (_, class_of) = it.maps.into_iter().find(is_ours)?;
            Some(Self { program, class_of })
        });
        Ok(ours.next())
    }

    fn detach(&self, link: u32) -> io::Result<()> {
        or_gone(self.program.detach_egress(link))
    }

    /// Has frames from these addresses in these classes, and all others in none.
    fn sort(&self, class_of: &BTreeMap<Vec<u8>, u32>) -> io::Result<()> {
        for (key, class) in class_of {
            self.class_of.set(key, *class)?;
        }
        for key in self.class_of.keys()?.iter().filter(|key| !class_of.contains_key(*key)) {
            or_gone(self.class_of.remove(key))?;
        }
        Ok(())
    }
}

fn key(address: IpAddr) -> Vec<u8> {
    let mut key = vec![0; KEY_LEN];
    match address {
        IpAddr::V4(address) => key[..4].copy_from_slice(&address.octets()),
        IpAddr::V6(address) => key[..16].copy_from_slice(&address.octets()),
    }
    key[16] = if address.is_ipv4() { 4 } else { 6 };
    key
}

/// Gives each frame the class of its source address as its priority.
fn code(class_of: &Map) -> Vec<Insn> {
    use Reg::{R0, R1, R2, R5, R6, R10};
    /// Offset of `priority` in `struct __sk_buff`.
    const CTX_PRIORITY: i16 = 32;
    /// Where the headers and the key are built.
    const FRAME: i16 = -64;
    const KEY: i16 = -(KEY_LEN as i16) - 4;
    let mut asm = Asm::default();
    let [v6, look, next] = [(); 3].map(|()| asm.label());
    asm.mov(R6, R1);
    asm.mov_imm(R2, 0);
    asm.copy_packet(FRAME, 34, next);
    for at in (0..KEY_LEN as i16).step_by(4) {
        asm.store_imm(Size::W, R10, KEY + at, 0);
    }
    asm.load(Size::H, R5, R10, FRAME + 12);
    asm.jump32_if_imm(Cond::Eq, R5, net_u16(0x86dd), v6);
    asm.jump32_if_imm(Cond::Ne, R5, net_u16(0x0800), next);
    asm.load(Size::H, R5, R10, FRAME + 14 + 12);
    asm.store(Size::H, R10, KEY, R5);
    asm.load(Size::H, R5, R10, FRAME + 14 + 14);
    asm.store(Size::H, R10, KEY + 2, R5);
    asm.store_imm(Size::B, R10, KEY + 16, 4);
    asm.jump(look);
    asm.bind(v6);
    asm.mov_imm(R2, 14 + 8);
    asm.copy_packet(KEY, 16, next);
    asm.store_imm(Size::B, R10, KEY + 16, 6);
    asm.bind(look);
    asm.load_map(R1, class_of.raw_fd());
    asm.mov(R2, R10);
    asm.add_imm(R2, KEY.into());
    asm.call(Helper::MapLookupElem);
    asm.jump_if_imm(Cond::Eq, R0, 0, next);
    asm.load(Size::W, R1, R0, 0);
    asm.store(Size::W, R6, CTX_PRIORITY, R1);
    asm.bind(next);
    asm.mov_imm(R0, TCX_NEXT);
    asm.exit();
    asm.assemble()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of ends grow as long as the machine runs: those of two may differ by all classes.
    #[test]
    fn each_container_has_a_class_of_its_own() {
        let rate = Rate::of_bits(1_000_000).expect("a rate");
        let portion = |end| Portion { end, rate, ceil: rate, addresses: BTreeSet::new() };
        let ends = [7, 7 + CLASSES_MAX, 8, 7 + 2 * CLASSES_MAX, CLASSES_MAX - 1, u32::MAX];
        let portions = ends.map(portion);
        let classes = by_class(&portions);
        let of: BTreeSet<u32> = classes.values().map(|portion| portion.end).collect();
        assert_eq!(of, ends.into());
        assert!(classes.keys().all(|class| *class >= FIRST && class >> 16 == HANDLE >> 16));
    }
}
