//! What a driver says of its interface: `SIOCETHTOOL` (`linux/ethtool.h`, `net/ethtool/ioctl.c`). None of these questions needs a privilege.
#![allow(unsafe_code)]

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GFEATURES: u32 = 0x3a;
const ETHTOOL_GCHANNELS: u32 = 0x3c;
/// The set of the features' names.
const ETH_SS_FEATURES: u32 = 4;
/// `ETH_GSTRING_LEN`, and in words.
const NAME_LEN: usize = 32;
const NAME_WORDS: usize = NAME_LEN / 4;
/// More features than any kernel has: 64 as of Linux 6.18.
const FEATURES_MAX: u32 = 1024;
/// Words of a `struct ethtool_get_features_block`: available, requested, active, never changed.
const BLOCK_WORDS: usize = 4;
const ACTIVE: usize = 2;

/// The receive queues in use, or `None` where the driver does not say (then it has one, or we learn
/// from `bind`).
pub(crate) fn receive_queues(interface: &str) -> Option<u32> {
    // Any socket of the namespace serves for the request.
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
    // `struct ethtool_channels`: the command, four limits, and counts of receive, transmit, other and combined queues.
    let mut channels = [ETHTOOL_GCHANNELS, 0, 0, 0, 0, 0, 0, 0, 0];
    ask(socket.as_fd(), &mut named(interface)?, &mut channels).ok()?;
    let queues = channels[5] + channels[8];
    (queues > 0).then_some(queues)
}

/// Whether an interface takes UDP super-packets whole. If it does not, the kernel takes them apart before.
#[derive(Debug)]
pub(crate) struct Segmentation {
    interface: u32,
    /// `None`: there is no such feature, or nobody may ask.
    bits: Option<Bits>,
    /// A request for all features, and the answer to the last.
    features: Vec<u32>,
    whole: bool,
}

/// Which features decide (`netif_skb_features` of `net/core/dev.c`): who segments has to sum, too.
#[derive(Debug)]
struct Bits {
    segmentation: usize,
    sum_any: Option<usize>,
    sum_each: [Option<usize>; 2],
}

impl Segmentation {
    /// Asks by `socket`, of the namespace of the interface with this index.
    pub(crate) fn new(socket: BorrowedFd<'_>, interface: u32) -> Self {
        let names = feature_names(socket, interface).unwrap_or_default();
        let place = |wanted: &str| names.iter().position(|name| name == wanted);
        let bits = place("tx-udp-segmentation").map(|segmentation| Bits {
            segmentation,
            sum_any: place("tx-checksum-ip-generic"),
            sum_each: ["tx-checksum-ipv4", "tx-checksum-ipv6"].map(place),
        });
        let features = vec![0; 2 + BLOCK_WORDS * names.len().div_ceil(32)];
        let mut this = Self { interface, bits, features, whole: false };
        this.refresh(socket);
        this
    }

    /// Asks again. Does not allocate.
    pub(crate) fn refresh(&mut self, socket: BorrowedFd<'_>) {
        self.whole = self.bits.is_some() && self.read(socket).is_ok() && self.says_so();
    }

    /// What was heard last; `false` if nobody says.
    #[inline]
    pub(crate) fn is_whole(&self) -> bool {
        self.whole
    }

    fn read(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let blocks = (self.features.len() - 2) / BLOCK_WORDS;
        self.features.fill(0);
        self.features[..2].copy_from_slice(&[ETHTOOL_GFEATURES, blocks as u32]);
        ask(socket, &mut name_of(socket, self.interface)?, &mut self.features)
    }

    fn says_so(&self) -> bool {
        let is_on = |bit: usize| {
            let active = self.features.get(2 + bit / 32 * BLOCK_WORDS + ACTIVE);
            active.is_some_and(|word| word >> (bit % 32) & 1 == 1)
        };
        self.bits.as_ref().is_some_and(|bits| {
            let sums = bits.sum_any.is_some_and(is_on)
                || bits.sum_each.iter().all(|bit| bit.is_some_and(is_on));
            is_on(bits.segmentation) && sums
        })
    }
}

/// The names of all features, in the order of their bits.
fn feature_names(socket: BorrowedFd<'_>, interface: u32) -> io::Result<Vec<String>> {
    let mut name = name_of(socket, interface)?;
    // `struct ethtool_sset_info`: a set of the sets asked for, of 64 bits, and the count of each.
    let sets = (1_u64 << ETH_SS_FEATURES).to_ne_bytes();
    let word = |at: usize| u32::from_ne_bytes([sets[at], sets[at + 1], sets[at + 2], sets[at + 3]]);
    let mut info = [ETHTOOL_GSSET_INFO, 0, word(0), word(4), 0];
    ask(socket, &mut name, &mut info)?;
    let count = info[4];
    if count == 0 || count > FEATURES_MAX {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let mut strings = vec![0; 3 + count as usize * NAME_WORDS];
    strings[..3].copy_from_slice(&[ETHTOOL_GSTRINGS, ETH_SS_FEATURES, count]);
    ask(socket, &mut name, &mut strings)?;
    let text = |words: &[u32]| {
        let bytes = words.iter().flat_map(|word| word.to_ne_bytes()).take_while(|byte| *byte != 0);
        String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
    };
    Ok(strings[3..].chunks_exact(NAME_WORDS).map(text).collect())
}

/// A request about the interface of this name.
fn named(interface: &str) -> Option<libc::ifreq> {
    // SAFETY: all zeroes is a value of this plain struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let name = interface.as_bytes();
    if name.len() >= request.ifr_name.len() {
        return None;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name) {
        *to = from.cast_signed();
    }
    Some(request)
}

/// A request about the interface that has this index now, whatever it is called.
fn name_of(socket: BorrowedFd<'_>, interface: u32) -> io::Result<libc::ifreq> {
    // SAFETY: all zeroes is a value of this plain struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_ifru.ifru_ifindex = interface.cast_signed();
    // SAFETY: the kernel reads the index of the request and writes its name; it lives through the call.
    let result = unsafe {
        libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFNAME as libc::Ioctl, &raw mut request)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(request) }
}

/// Has the kernel answer the command in the first word; its answer takes the place of the command, whose arguments say that it is no longer.
fn ask(socket: BorrowedFd<'_>, name: &mut libc::ifreq, command: &mut [u32]) -> io::Result<()> {
    name.ifr_ifru.ifru_data = command.as_mut_ptr().cast();
    // SAFETY: the request names an interface, zero-terminated, and points to words of which the command in the first, with the counts behind it that the callers
    // above take from the slice's length, has the kernel read and write no more than there are; both live through the call.
    let result = unsafe {
        libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as libc::Ioctl, std::ptr::from_mut(name))
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iface::Interface;
    use crate::testns::{Pair, needs, or_skip};

    fn ask_of(interface: &str) -> Segmentation {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket");
        let index = Interface::by_name(interface).expect("an interface").index;
        Segmentation::new(socket.as_fd(), index)
    }

    #[test]
    fn an_interface_says_whether_it_takes_super_packets_whole() {
        let pair = or_skip!(
            "ethtool::an_interface_says_whether_it_takes_super_packets_whole",
            needs(&["ethtool"]).and_then(|()| Pair::new())
        );
        let mut heard = pair.a.run(|| ask_of("v0"));
        assert!(heard.is_whole(), "a veth does: {heard:?}");
        let socket = pair.a.run(|| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket"));
        for (change, whole) in [
            ("tx-udp-segmentation off", false),
            ("tx-udp-segmentation on", true),
            ("tx off", false),
            ("tx on", true),
            ("gso off", true),
        ] {
            pair.a.sh(&format!("ethtool -K v0 {change} >/dev/null 2>&1"));
            assert_eq!(heard.is_whole(), !whole || change == "gso off", "until it is asked");
            heard.refresh(socket.as_fd());
            assert_eq!(heard.is_whole(), whole, "{change}: {heard:?}");
        }
        pair.a.sh("ip link set v0 down; ip link set v0 name renamed");
        heard.refresh(socket.as_fd());
        assert!(heard.is_whole(), "it is found by its index: {heard:?}");
        pair.a.sh("ip link del renamed");
        heard.refresh(socket.as_fd());
        assert!(!heard.is_whole(), "it is gone");
    }

    #[test]
    fn what_is_not_there_says_nothing() {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket");
        assert!(!Segmentation::new(socket.as_fd(), u32::MAX >> 1).is_whole());
        assert_eq!(receive_queues("no-such-if"), None);
        assert_eq!(receive_queues("a-name-that-is-too-long"), None);
    }
}
