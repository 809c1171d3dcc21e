//! Rates at the host's end of a container. Towards the container a tbf at the root of the end.
//! From it a program at the tcx ingress of the end, behind all others, that sends each frame
//! through a tbf on an ifb, from where the kernel takes it up again; or, where nft chains at the
//! ingress would not see such frames, that drops those beyond the rate.
//!
//! Names and a handle of its own show an agent its parts, so that others' are never changed.

use std::fmt;
use std::io;

use rocinante_netdev::for_agent::bpf::Program;
use rocinante_netdev::for_agent::nft_at_ingress;
use rocinante_netdev::for_agent::rtnl::query::{Query, text, word};
use rocinante_netdev::for_agent::rtnl::socket::{Attributes, NetlinkSocket};
use serde::{Deserialize, Serialize};

use super::filter::PROGRAM as SOURCES;
use super::gate::Gate;
use crate::rate::Rate;

pub(super) const RTM_NEWQDISC: u16 = 36;
const RTM_DELQDISC: u16 = 37;
const RTM_GETQDISC: u16 = 38;
const RTM_NEWTFILTER: u16 = 44;
const RTM_GETTFILTER: u16 = 46;
pub(super) const CREATE: u16 = libc::NLM_F_CREATE as u16;
const EXCLUSIVE: u16 = libc::NLM_F_EXCL as u16;
/// Without it the kernel answers a question about a discipline to listening sockets alone.
const ECHO: u16 = libc::NLM_F_ECHO as u16;
// Of `linux/pkt_sched.h` and `linux/rtnetlink.h`.
pub(super) const ROOT: u32 = 0xffff_ffff;
const INGRESS_FILTERS: u32 = 0xffff_fff2;
const TC_HEADER: usize = 20;
pub(super) const TCA_KIND: u16 = 1;
pub(super) const TCA_OPTIONS: u16 = 2;
const TCA_STATS2: u16 = 7;
const STATS_BASIC: u16 = 1;
const STATS_QUEUE: u16 = 3;
const TBF_PARAMETERS: u16 = 1;
const TBF_RATE64: u16 = 4;
const TBF_BURST: u16 = 6;
pub(super) const LINK_LAYER_ETHERNET: u8 = 1;
/// Nanoseconds of a tick of the packet scheduler.
const TICK: u64 = 64;
// Of `linux/if_link.h`.
const LINK_HEADER: usize = 16;
const IFLA_IFNAME: u16 = 3;
const IFLA_INFO_KIND: u16 = 1;

const TBF: &str = "tbf";
const IFB: &str = "ifb";
/// The handle of a tbf of ours.
pub(super) const HANDLE: u32 = 0x4791_0000;
/// The beginning of the name of an ifb of ours: the number of the host's end follows.
const IFB_NAME: &str = "roce-";

/// The least burst: a super-packet, and another while that is sent.
const BURST_LEAST: u64 = 128 << 10;
/// The time in which a burst is as long as the rate: what a busy processor may be late by.
pub(super) const BURST_MS: u64 = 4;
/// The same of a policer: TCP's least RTO, so that the credit saved while TCP waits covers what it
/// then repeats.
const POLICED_BURST_MS: u64 = 200;
/// The time that a frame waits at most.
pub(super) const QUEUE_MS: u64 = 25;

/// The rates of a container: into it and out of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rates {
    /// Towards the container.
    #[serde(rename = "ingress_rate", skip_serializing_if = "Option::is_none")]
    pub ingress: Option<Rate>,
    /// From the container.
    #[serde(rename = "egress_rate", skip_serializing_if = "Option::is_none")]
    pub egress: Option<Rate>,
    /// The bits that pass at once towards the container: between the bursts of a class and a second
    /// of the rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress_burst_bits: Option<u64>,
    /// Likewise, from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_burst_bits: Option<u64>,
}

impl Rates {
    /// The lesser rate of each way, with its burst.
    #[must_use]
    pub fn least(self, other: Self) -> Self {
        let is_less = |one: Option<Rate>, other: Option<Rate>| {
            one.is_some_and(|one| other.is_none_or(|other| one < other))
        };
        let into = if is_less(other.ingress, self.ingress) { other } else { self };
        let out = if is_less(other.egress, self.egress) { other } else { self };
        Self {
            ingress: into.ingress,
            egress: out.egress,
            ingress_burst_bits: into.ingress_burst_bits,
            egress_burst_bits: out.egress_burst_bits,
        }
    }
}

/// The way by which a rate binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Means {
    /// Frames wait.
    Shaper,
    /// Frames are dropped.
    Policer,
}

/// A rate in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct InForce {
    /// How it binds.
    pub by: Means,
    /// Bytes that were let through; 0 of a policer.
    pub bytes: u64,
    /// Frames that had to wait; 0 of a policer.
    pub delayed: u64,
    /// Frames that were dropped.
    pub dropped: u64,
    /// Bytes that wait now; 0 of a policer.
    #[serde(default)]
    pub backlog: u64,
}

/// Why a rate is not in force.
#[derive(Debug)]
pub enum ShaperError {
    /// Something of others is in the way: its name and place.
    Foreign(String),
    /// The kernel refused: what, and how.
    Kernel(&'static str, io::Error),
}

impl fmt::Display for ShaperError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign(what) => write!(f, "{what} is in the way, and is not the agent's"),
            Self::Kernel(what, error) => write!(f, "cannot {what}: {error}"),
        }
    }
}

/// A queueing discipline at the root of a link.
pub(super) struct Root {
    pub(super) kind: String,
    pub(super) handle: u32,
    bytes: u64,
    dropped: u64,
    delayed: u64,
    backlog: u64,
}

impl Root {
    fn is_tbf_of_ours(&self) -> bool {
        self.handle == HANDLE && self.kind == TBF
    }
}

/// A link with an asked name.
struct Link {
    index: u32,
    kind: String,
    is_up: bool,
}

/// Asks the kernel, and tells it.
#[derive(Debug)]
pub struct Shaper {
    pub(super) socket: NetlinkSocket,
}

pub(super) type Done<T> = Result<T, ShaperError>;

/// A rate of one way.
#[derive(Clone, Copy)]
struct Bursty {
    rate: Rate,
    /// The bits that are to pass at once.
    burst_bits: Option<u64>,
    /// Whether the tbf has both already, if there is one.
    is_set: bool,
}

pub(super) fn kernel(what: &'static str) -> impl FnOnce(io::Error) -> ShaperError {
    move |error| ShaperError::Kernel(what, error)
}

impl Shaper {
    /// Works in the calling thread's network namespace. Error: no descriptor left.
    pub fn open() -> io::Result<Self> {
        Ok(Self { socket: NetlinkSocket::open(netlink_sys::protocols::NETLINK_ROUTE)? })
    }

    /// Puts these rates in force at the host's end with this index and name, and no others. Without
    /// one the parts of ours go. May be called again, and repairs a missing part. If the rates were
    /// set already (`is_set`), a tbf that is there stays: to set it again would fill its bucket.
    /// Error: something of others is in the way, and stays as it is; or the kernel's. Then the rate
    /// towards the container may be in force, and that from it is not, or the one before.
    pub fn set(&mut self, end: u32, name: &str, rates: Rates, is_set: bool) -> Done<()> {
        let bursty = |rate, burst_bits| Bursty { rate, burst_bits, is_set };
        match rates.ingress {
            Some(rate) => self.shape(end, name, bursty(rate, rates.ingress_burst_bits))?,
            None => self.remove_tbf(end).map_err(kernel("take a tbf off"))?,
        }
        match rates.egress {
            Some(rate) => self.gate(end, name, bursty(rate, rates.egress_burst_bits)),
            None => {
                Gate::remove(end).map_err(kernel("take a program off"))?;
                self.remove_ifb(end).map_err(kernel("remove an ifb"))
            }
        }
    }

    /// The rates in force at a host's end: into the container and out of it. Error: the kernel's.
    pub fn in_force(&mut self, end: u32) -> io::Result<[Option<InForce>; 2]> {
        let shaper = |root: Root| {
            let Root { bytes, dropped, delayed, backlog, .. } = root;
            InForce { by: Means::Shaper, bytes, delayed, dropped, backlog }
        };
        let ingress = self.root(end)?.filter(Root::is_tbf_of_ours).map(shaper);
        let egress = match Gate::find(end)? {
            None => None,
            Some(gate) => match gate.policed()? {
                Some(dropped) => {
                    let by = Means::Policer;
                    Some(InForce { by, bytes: 0, delayed: 0, dropped, backlog: 0 })
                }
                None => match self.link(&ifb_of(end))? {
                    Some(link) => self.root(link.index)?.filter(Root::is_tbf_of_ours).map(shaper),
                    None => None,
                },
            },
        };
        Ok([ingress, egress])
    }

    /// Takes the parts of ours off a host's end, which may have gone. Error: the kernel's.
    pub fn clear(&mut self, end: u32) -> io::Result<()> {
        self.remove_tbf(end)?;
        Gate::remove(end)?;
        self.remove_ifb(end)
    }

    /// Removes an ifb of ours, whose host's end may have gone. Error: the kernel's.
    pub fn remove_ifb(&mut self, end: u32) -> io::Result<()> {
        let Some(link) = self.link(&ifb_of(end))?.filter(|link| link.kind == IFB) else {
            return Ok(());
        };
        let query = Query::new(&link_header(link.index, 0));
        match self.socket.request_one(libc::RTM_DELLINK, 0, query.bytes(), &mut |_, _| {}) {
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            done => done,
        }
    }

    /// The number of the host's end in the name of an ifb of ours.
    #[must_use]
    pub fn end_of(name: &str, kind: &str) -> Option<u32> {
        name.strip_prefix(IFB_NAME).filter(|_| kind == IFB)?.parse().ok()
    }

    /// Makes a tbf of ours the root of a link.
    fn shape(&mut self, link: u32, name: &str, rate: Bursty) -> Done<()> {
        let listed = || kernel("list queueing disciplines");
        if rate.is_set && self.root(link).map_err(listed())?.is_some_and(|it| it.is_tbf_of_ours()) {
            return Ok(());
        }
        match self.set_tbf(link, rate) {
            Err(e) if matches!(e.raw_os_error(), Some(libc::EEXIST | libc::EINVAL)) => {
                let root = self.root(link).map_err(listed())?;
                Err(match root.filter(|root| !root.is_tbf_of_ours()) {
                    Some(Root { kind, handle, .. }) => {
                        let what = format!("{kind} {:x}: at the root of {name}", handle >> 16);
                        ShaperError::Foreign(what)
                    }
                    None => ShaperError::Kernel("set a tbf", e),
                })
            }
            set => set.map_err(kernel("set a tbf (CONFIG_NET_SCH_TBF)")),
        }
    }

    /// Makes or changes a tbf. The kernel refuses if another discipline is there.
    fn set_tbf(&mut self, link: u32, rate: Bursty) -> io::Result<()> {
        let options = tbf_options(rate);
        let query = Query::new(&tc_header(link, HANDLE, ROOT));
        let query = query.attribute(TCA_KIND, b"tbf\0").attribute(TCA_OPTIONS, options.bytes());
        self.socket.request_one(RTM_NEWQDISC, CREATE, query.bytes(), &mut |_, _| {})
    }

    fn remove_tbf(&mut self, link: u32) -> io::Result<()> {
        self.remove_root(link, TBF)
    }

    /// Takes off the root of a link that is of this kind and ours.
    pub(super) fn remove_root(&mut self, link: u32, kind: &str) -> io::Result<()> {
        let kind = format!("{kind}\0");
        let query = Query::new(&tc_header(link, HANDLE, ROOT));
        let query = query.attribute(TCA_KIND, kind.as_bytes());
        match self.socket.request_one(RTM_DELQDISC, 0, query.bytes(), &mut |_, _| {}) {
            // There is none, or one of others, or the link has gone.
            Err(e) if is_none(&e) => Ok(()),
            done => done,
        }
    }

    /// Has each frame of a container pass the rate.
    fn gate(&mut self, end: u32, name: &str, rate: Bursty) -> Done<()> {
        if let Some(foreign) = self.foreign_at_ingress(end, name)? {
            return Err(ShaperError::Foreign(foreign));
        }
        let shadowed = nft_at_ingress(name).map_err(kernel("list nft chains"))?;
        if shadowed.is_empty() {
            let redirected = self.redirect(end, rate);
            if redirected.is_err() && matches!(Gate::find(end), Ok(None) | Err(_)) {
                let _ = self.remove_ifb(end);
            }
            return redirected;
        }
        let Bursty { rate, burst_bits, .. } = rate;
        let burst = burst_of(rate, POLICED_BURST_MS, burst_bits);
        Gate::policing(end, rate, burst).map_err(kernel("put a program at tcx"))?;
        self.remove_ifb(end).map_err(kernel("remove an ifb"))
    }

    fn redirect(&mut self, end: u32, rate: Bursty) -> Done<()> {
        let ifb = self.ifb(end)?;
        self.shape(ifb, &ifb_of(end), rate)?;
        Gate::redirecting(end, ifb).map_err(kernel("put a program at tcx"))
    }

    /// Programs and filters of others at the ingress: one of them may send frames past ours.
    fn foreign_at_ingress(&mut self, end: u32, name: &str) -> Done<Option<String>> {
        let programs = Program::at_ingress(end).map_err(kernel("list tcx programs"))?;
        for program in programs {
            let described = program.described().map_err(kernel("list tcx programs"))?;
            if described.name != SOURCES && !Gate::is_one(&described) {
                let what = format!("the program {:?} at tcx ingress of {name}", described.name);
                return Ok(Some(what));
            }
        }
        let mut filter = None;
        let query = Query::new(&tc_header(end, 0, INGRESS_FILTERS));
        self.socket
            .request(RTM_GETTFILTER, true, query.bytes(), &mut |kind, body| {
                let of_it = body.get(4..8) == Some(&end.to_ne_bytes());
                if kind == RTM_NEWTFILTER && of_it {
                    filter = attribute(body, TC_HEADER, TCA_KIND).map(text);
                }
            })
            .map_err(kernel("list filters"))?;
        Ok(filter.map(|kind| format!("a filter ({kind}) at the ingress of {name}")))
    }

    /// The index of the ifb of a host's end, which is made if it is not there.
    fn ifb(&mut self, end: u32) -> Done<u32> {
        let name = ifb_of(end);
        let failed = || kernel("make an ifb (CONFIG_IFB)");
        if self.link(&name).map_err(failed())?.is_none() {
            let text = format!("{name}\0");
            let kind = Query::new(&[]).attribute(IFLA_INFO_KIND, IFB.as_bytes());
            let query = Query::new(&link_header(0, libc::IFF_UP as u32))
                .attribute(IFLA_IFNAME, text.as_bytes())
                .attribute(libc::IFLA_LINKINFO, kind.bytes());
            let flags = CREATE | EXCLUSIVE;
            self.socket
                .request_one(libc::RTM_NEWLINK, flags, query.bytes(), &mut |_, _| {})
                .map_err(failed())?;
        }
        match self.link(&name).map_err(failed())? {
            Some(Link { index, kind, is_up: true }) if kind == IFB => Ok(index),
            Some(Link { index, kind, .. }) if kind == IFB => {
                let query = Query::new(&link_header(index, libc::IFF_UP as u32));
                let up =
                    self.socket.request_one(libc::RTM_NEWLINK, 0, query.bytes(), &mut |_, _| {});
                up.map(|()| index).map_err(failed())
            }
            Some(_) => Err(ShaperError::Foreign(format!("the link {name}"))),
            None => Err(failed()(io::ErrorKind::NotFound.into())),
        }
    }

    fn link(&mut self, name: &str) -> io::Result<Option<Link>> {
        let text_of = format!("{name}\0");
        let query = Query::new(&link_header(0, 0)).attribute(IFLA_IFNAME, text_of.as_bytes());
        let mut found = None;
        let asked = self.socket.request_one(libc::RTM_GETLINK, 0, query.bytes(), &mut |_, body| {
            let number = |at: usize| body.get(at..at + 4).and_then(word);
            let (Some(index), Some(flags)) = (number(4), number(8)) else { return };
            let info = attribute(body, LINK_HEADER, libc::IFLA_LINKINFO).unwrap_or(&[]);
            let kind = attribute(info, 0, IFLA_INFO_KIND).map(text).unwrap_or_default();
            found = Some(Link { index, kind, is_up: flags & libc::IFF_UP as u32 != 0 });
        });
        match asked {
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            asked => asked.map(|()| found),
        }
    }

    /// The discipline at the root of a link; `None` if it has none, or one that the kernel chose,
    /// or has gone.
    pub(super) fn root(&mut self, link: u32) -> io::Result<Option<Root>> {
        let query = Query::new(&tc_header(link, 0, ROOT));
        let mut found = None;
        let asked =
            self.socket.request_one(RTM_GETQDISC, ECHO, query.bytes(), &mut |kind, body| {
                let handle = body.get(8..12).and_then(word).unwrap_or_default();
                if kind == RTM_NEWQDISC && handle != 0 {
                    found = root_from(body, handle);
                }
            });
        match asked {
            Err(e) if is_none(&e) => Ok(None),
            asked => asked.map(|()| found),
        }
    }
}

/// Whether a link has no such discipline, or has gone.
fn is_none(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINVAL | libc::ENODEV))
}

fn root_from(body: &[u8], handle: u32) -> Option<Root> {
    let statistics = attribute(body, TC_HEADER, TCA_STATS2).unwrap_or(&[]);
    let basic = attribute(statistics, 0, STATS_BASIC).and_then(|it| it.first_chunk());
    let queue = attribute(statistics, 0, STATS_QUEUE).unwrap_or(&[]);
    // `struct gnet_stats_queue`: qlen, backlog, drops, requeues, overlimits.
    let count = |at: usize| queue.get(4 * at..4 * at + 4).and_then(word).unwrap_or_default().into();
    Some(Root {
        kind: text(attribute(body, TC_HEADER, TCA_KIND)?),
        handle,
        bytes: basic.map_or(0, |bytes| u64::from_ne_bytes(*bytes)),
        dropped: count(2),
        delayed: count(4),
        backlog: count(1),
    })
}

fn attribute(message: &[u8], header: usize, kind: u16) -> Option<&[u8]> {
    let mut all = Attributes(message.get(header..)?);
    all.find(|(of, _)| *of == kind).map(|(_, value)| value)
}

fn ifb_of(end: u32) -> String {
    format!("{IFB_NAME}{end}")
}

/// The bytes that pass at once: those of this time, or as many as are asked for.
pub(super) fn burst_of(rate: Rate, ms: u64, asked_bits: Option<u64>) -> u64 {
    // More than a second's, which engines ask for by default, would bind nothing for long.
    let asked = asked_bits.map_or(0, |bits| (bits / 8).min(rate.bytes()));
    (rate.bytes() * ms / 1000).max(BURST_LEAST).max(asked)
}

/// A number of 32 bits, or the greatest.
pub(super) fn short(number: u64) -> [u8; 4] {
    u32::try_from(number).unwrap_or(u32::MAX).to_ne_bytes()
}

/// The time that these bytes take at a rate, as the packet scheduler counts it.
pub(super) fn ticks(bytes: u64, rate: Rate) -> u64 {
    bytes * 1_000_000_000 / rate.bytes() / TICK
}

/// `struct tcmsg`.
pub(super) fn tc_header(link: u32, handle: u32, parent: u32) -> [u8; TC_HEADER] {
    let mut header = [0; TC_HEADER];
    header[4..8].copy_from_slice(&link.to_ne_bytes());
    header[8..12].copy_from_slice(&handle.to_ne_bytes());
    header[12..16].copy_from_slice(&parent.to_ne_bytes());
    header
}

/// `struct ifinfomsg`, which sets these flags.
fn link_header(index: u32, flags: u32) -> [u8; LINK_HEADER] {
    let mut header = [0; LINK_HEADER];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.to_ne_bytes());
    header[12..16].copy_from_slice(&flags.to_ne_bytes());
    header
}

fn tbf_options(Bursty { rate, burst_bits, .. }: Bursty) -> Query {
    let (bytes, burst) = (rate.bytes(), burst_of(rate, BURST_MS, burst_bits));
    // A burst that is asked for makes no frame wait longer.
    let queue = burst_of(rate, BURST_MS, None) + bytes * QUEUE_MS / 1000;
    // `struct tc_tbf_qopt`: two of `struct tc_ratespec`, the limit, the buffer, and none.
    let mut parameters = [0; 36];
    parameters[1] = LINK_LAYER_ETHERNET;
    parameters[8..12].copy_from_slice(&short(bytes));
    parameters[24..28].copy_from_slice(&short(queue));
    parameters[28..32].copy_from_slice(&short(ticks(burst, rate)));
    Query::new(&[])
        .attribute(TBF_PARAMETERS, &parameters)
        .attribute(TBF_RATE64, &bytes.to_ne_bytes())
        .attribute(TBF_BURST, &short(burst))
}
