//! Capabilities of an interface's driver: `SIOCETHTOOL` (`linux/ethtool.h`, `net/ethtool/ioctl.c`).
//! None of these requests needs a privilege.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Instant;

use rustix::net::AddressFamily;

use crate::kernel::descriptors::datagram_socket;
use crate::kernel::rtnl::Rtnl;
use crate::kernel::worded::is_passing;
use crate::tuning::routes::ASK_AGAIN;

const ETHTOOL_GSET: u32 = 0x1;
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GFEATURES: u32 = 0x3a;
const ETHTOOL_GCHANNELS: u32 = 0x3c;
/// The set of the features' names.
const ETH_SS_FEATURES: u32 = 4;
/// `ETH_GSTRING_LEN`, in bytes and in words.
const NAME_LEN: usize = 32;
const NAME_WORDS: usize = NAME_LEN / 4;
/// More features than any kernel has: 64 as of Linux 6.18.
const FEATURES_MAX: u32 = 1024;
/// Words before the blocks of a `struct ethtool_gfeatures`, and before the names of a
/// `struct ethtool_gstrings`.
const FEATURES_HEADER_WORDS: usize = 2;
const STRINGS_HEADER_WORDS: usize = 3;
/// Words of a `struct ethtool_get_features_block`: available, requested, active, never changed.
const BLOCK_WORDS: usize = 4;
const ACTIVE: usize = 2;

/// The number of receive queues in use. `None` if the driver does not say: then it has one queue,
/// or `bind` shows otherwise.
pub(crate) fn receive_queues(interface: &str) -> Option<u32> {
    let socket = datagram_socket(AddressFamily::INET).ok()?;
    let channels = read_channels(socket.as_fd(), &mut named(interface)?).ok()?;
    queues_in(&channels)
}

/// The speed of a link in Mb/s. `None` if it has none, as loopback, or is down.
pub(crate) fn link_speed(interface: &str) -> Option<u32> {
    let socket = datagram_socket(AddressFamily::INET).ok()?;
    speed_in(&read_settings(socket.as_fd(), &mut named(interface)?).ok()?)
}

/// The speed is in two halves; all ones and 0 stand for an unknown one.
fn speed_in(settings: &[u32; 11]) -> Option<u32> {
    let half = |word: u32| {
        let bytes = word.to_ne_bytes();
        u32::from(u16::from_ne_bytes([bytes[0], bytes[1]]))
    };
    let low = half(settings[3]);
    match half(settings[7]) << 16 | low {
        0 | 0xffff | u32::MAX => None,
        speed => Some(speed),
    }
}

/// The sum of the receive-only queues and the combined ones.
fn queues_in(channels: &[u32; 9]) -> Option<u32> {
    let queues = channels[5].saturating_add(channels[8]);
    (queues > 0).then_some(queues)
}

/// Which UDP super-packets an interface takes whole. The kernel segments all others before.
#[derive(Debug)]
pub(crate) struct Segmentation {
    interface: u32,
    rtnl: Rtnl,
    /// `None`: the feature does not exist, or the kernel has not answered yet.
    bits: Option<Bits>,
    /// The last answer about all features.
    features: Vec<u32>,
    whole: Limits,
    /// When the last request failed; `None` once a later one was answered.
    unanswered: Option<Instant>,
    /// The number of requests.
    #[cfg(test)]
    pub(crate) questions: u32,
}

/// Limits of super-packets that are taken whole (`gso_features_check` of `net/core/dev.c`); the
/// default is none.
#[derive(Debug, Clone, Copy, Default)]
struct Limits {
    /// The most segments.
    segments: usize,
    /// Bytes with all headers; a super-packet must be shorter.
    bytes: usize,
}

/// The features that decide (`netif_skb_features` of `net/core/dev.c`): a device that segments must
/// also compute checksums.
#[derive(Debug)]
struct Bits {
    segmentation: usize,
    sum_any: Option<usize>,
    sum_each: [Option<usize>; 2],
}

impl Segmentation {
    /// Asks through `socket` about an interface of the calling thread's network namespace, which
    /// must be the socket's. Error: the kernel's answer to `socket(AF_NETLINK)`: no descriptors
    /// left, or a seccomp filter.
    pub(crate) fn new(socket: BorrowedFd<'_>, interface: u32) -> io::Result<Self> {
        let mut this = Self {
            interface,
            rtnl: Rtnl::open()?,
            bits: None,
            features: Vec::new(),
            whole: Limits::default(),
            unanswered: None,
            #[cfg(test)]
            questions: 0,
        };
        this.refresh(socket);
        Ok(this)
    }

    /// Asks again. The kernel takes its RTNL lock for that, so call this only when the interface
    /// changed. Without an answer the last one stays, and the port
    /// [has to ask again](Self::is_unanswered).
    ///
    /// The kernel does not announce a change of `gso_max_segs` or `gso_max_size` alone
    /// (`do_setlink` as of Linux 6.18). Such a change takes effect with the next announced one.
    pub(crate) fn refresh(&mut self, socket: BorrowedFd<'_>) {
        #[cfg(test)]
        {
            self.questions += 1;
        }
        let answer = self.read(socket);
        self.update(answer);
    }

    /// Whether the last request failed, and it is time to ask again.
    #[inline]
    pub(crate) fn is_unanswered(&self) -> bool {
        self.unanswered.is_some_and(|at| at.elapsed() >= ASK_AGAIN)
    }

    /// Whether a super-packet of `segments` segments, and `bytes` bytes with all headers, leaves
    /// whole according to the last answer; `false` if there was none.
    #[inline]
    pub(crate) fn takes(&self, segments: usize, bytes: usize) -> bool {
        segments <= self.whole.segments && bytes < self.whole.bytes
    }

    /// Pretends that a request failed, so long ago that it is time to ask again.
    #[cfg(test)]
    pub(crate) fn was_not_answered(&mut self) {
        self.update(Err(io::Error::from_raw_os_error(libc::ENOMEM)));
        self.unanswered = self.unanswered.and_then(|at| at.checked_sub(ASK_AGAIN));
    }

    fn update(&mut self, answer: io::Result<Limits>) {
        self.unanswered = None;
        match answer {
            Ok(whole) => self.whole = whole,
            Err(error) if is_passing(&error) => self.unanswered = Some(Instant::now()),
            Err(_) => self.whole = Limits::default(),
        }
    }

    /// # Errors
    /// `NotFound` if the interface is gone; or the kernel's answer.
    fn read(&mut self, socket: BorrowedFd<'_>) -> io::Result<Limits> {
        let link = self.rtnl.link(self.interface).map_err(|error| match error.raw_os_error() {
            Some(libc::ENODEV) => io::ErrorKind::NotFound.into(),
            _ => error,
        })?;
        let mut name = name_of(socket, self.interface)?;
        if self.bits.is_none() {
            self.learn_bits(socket, &mut name)?;
        }
        let Some(bits) = &self.bits else { return Ok(Limits::default()) };
        read_features(socket, &mut name, &mut self.features)?;
        if !bits.are_set_in(&self.features) {
            return Ok(Limits::default());
        }
        Ok(Limits { segments: link.gso_segs_max as usize, bytes: link.gso_bytes_max as usize })
    }

    fn learn_bits(&mut self, socket: BorrowedFd<'_>, name: &mut libc::ifreq) -> io::Result<()> {
        let names = read_feature_names(socket, name)?;
        let place = |wanted: &str| names.iter().position(|name| name == wanted);
        self.bits = place("tx-udp-segmentation").map(|segmentation| Bits {
            segmentation,
            sum_any: place("tx-checksum-ip-generic"),
            sum_each: ["tx-checksum-ipv4", "tx-checksum-ipv6"].map(place),
        });
        self.features = vec![0; FEATURES_HEADER_WORDS + BLOCK_WORDS * names.len().div_ceil(32)];
        Ok(())
    }
}

impl Bits {
    fn are_set_in(&self, features: &[u32]) -> bool {
        let is_on = |bit: usize| {
            let active = features.get(FEATURES_HEADER_WORDS + bit / 32 * BLOCK_WORDS + ACTIVE);
            active.is_some_and(|word| word >> (bit % 32) & 1 == 1)
        };
        let sums = self.sum_any.is_some_and(is_on)
            || self.sum_each.iter().all(|bit| bit.is_some_and(is_on));
        is_on(self.segmentation) && sums
    }
}

/// A `struct ethtool_channels`: the command, four limits, and the counts of receive, transmit,
/// other and combined queues.
fn read_channels(socket: BorrowedFd<'_>, name: &mut libc::ifreq) -> io::Result<[u32; 9]> {
    let mut channels = [ETHTOOL_GCHANNELS, 0, 0, 0, 0, 0, 0, 0, 0];
    // SAFETY: the kernel answers with just this struct.
    unsafe { ask(socket, name, &mut channels) }?;
    Ok(channels)
}

/// A `struct ethtool_cmd`.
fn read_settings(socket: BorrowedFd<'_>, name: &mut libc::ifreq) -> io::Result<[u32; 11]> {
    let mut settings = [ETHTOOL_GSET, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    // SAFETY: the kernel answers with just this struct.
    unsafe { ask(socket, name, &mut settings) }?;
    Ok(settings)
}

/// The number of features: a constant of the running kernel, the same for all interfaces.
fn count_features(socket: BorrowedFd<'_>, name: &mut libc::ifreq) -> io::Result<usize> {
    // `struct ethtool_sset_info`: a 64-bit mask of the requested sets, and the count of each.
    let sets = (1_u64 << ETH_SS_FEATURES).to_ne_bytes();
    let word = |at: usize| u32::from_ne_bytes([sets[at], sets[at + 1], sets[at + 2], sets[at + 3]]);
    let mut info = [ETHTOOL_GSSET_INFO, 0, word(0), word(4), 0];
    // SAFETY: one set is asked for, and there is room for one count.
    unsafe { ask(socket, name, &mut info) }?;
    match info[4] {
        count @ 1..=FEATURES_MAX => Ok(count as usize),
        _ => Err(io::ErrorKind::Unsupported.into()),
    }
}

/// The names of all features, in the order of their bits.
fn read_feature_names(socket: BorrowedFd<'_>, name: &mut libc::ifreq) -> io::Result<Vec<String>> {
    let count = count_features(socket, name)?;
    let mut strings = vec![0; STRINGS_HEADER_WORDS + count * NAME_WORDS];
    strings[..STRINGS_HEADER_WORDS].copy_from_slice(&[
        ETHTOOL_GSTRINGS,
        ETH_SS_FEATURES,
        count as u32,
    ]);
    // SAFETY: `ethtool_get_strings` ignores the count that it is given, and writes all names of the
    // set. The features are a constant table of the kernel, with the count that it has just
    // returned. (A driver's own set could grow between the two requests.)
    unsafe { ask(socket, name, &mut strings) }?;
    let text = |words: &[u32]| {
        let bytes = words.iter().flat_map(|word| word.to_ne_bytes()).take_while(|byte| *byte != 0);
        String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
    };
    Ok(strings[STRINGS_HEADER_WORDS..].chunks_exact(NAME_WORDS).map(text).collect())
}

/// Reads a `struct ethtool_gfeatures` with the number of blocks for which `features` has room,
/// which is at least its header.
fn read_features(
    socket: BorrowedFd<'_>,
    name: &mut libc::ifreq,
    features: &mut [u32],
) -> io::Result<()> {
    let blocks = (features.len() - FEATURES_HEADER_WORDS) / BLOCK_WORDS;
    features.fill(0);
    features[..FEATURES_HEADER_WORDS].copy_from_slice(&[ETHTOOL_GFEATURES, blocks as u32]);
    // SAFETY: the kernel writes no more blocks than the request says there is room for
    // (`ethtool_get_features`).
    unsafe { ask(socket, name, features) }
}

/// A request about the interface with this name.
fn named(interface: &str) -> Option<libc::ifreq> {
    // SAFETY: all zeroes is a value of this plain struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let name = interface.as_bytes();
    if name.len() >= request.ifr_name.len() {
        return None;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    Some(request)
}

/// A request about the interface that has this index now, under its current name.
fn name_of(socket: BorrowedFd<'_>, interface: u32) -> io::Result<libc::ifreq> {
    // SAFETY: all zeroes is a value of this plain struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_ifru.ifru_ifindex = interface.cast_signed();
    // SAFETY: the kernel reads the index in the request and writes its name; the request lives
    // through the call.
    let result = unsafe {
        libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFNAME as libc::Ioctl, &raw mut request)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(request) }
}

/// Sends the command in the first word to the kernel; the answer replaces the command.
///
/// # Safety
/// The kernel's answer to this command with these arguments is no longer than `command`.
unsafe fn ask(
    socket: BorrowedFd<'_>,
    name: &mut libc::ifreq,
    command: &mut [u32],
) -> io::Result<()> {
    name.ifr_ifru.ifru_data = command.as_mut_ptr().cast();
    // SAFETY: the request names an interface, zero-terminated, and points to the command. The
    // command is long enough, as the caller promises. Both live through the call.
    let result = unsafe {
        libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as libc::Ioctl, std::ptr::from_mut(name))
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;

    use crate::kernel::interface::Interface;
    use crate::testing::testns::{Pair, needs, or_skip};

    fn ask_of(interface: &str) -> Segmentation {
        let index = Interface::by_name(interface).expect("an interface").index;
        Segmentation::new(socket().as_fd(), index).expect("netlink")
    }

    fn socket() -> OwnedFd {
        datagram_socket(AddressFamily::INET).expect("a socket")
    }

    fn takes_any(asked: &Segmentation) -> bool {
        asked.takes(128, 65_535)
    }

    #[test]
    fn the_speed_of_a_link_is_its_drivers() {
        let pair = or_skip!("ethtool::the_speed_of_a_link_is_its_drivers", Pair::new());
        let speeds = pair.a.run(|| [link_speed("v0"), link_speed("lo"), link_speed("none")]);
        assert_eq!(speeds, [Some(10_000), None, None]);
        for (low, high, speed) in [
            (0, 0, None),
            (0xffff, 0, None),
            (0xffff, 0xffff, None),
            (0x86a0, 1, Some(100_000)),
            (10_000, 0, Some(10_000)),
        ] {
            let half = |value: u16| {
                let [one, two] = value.to_ne_bytes();
                u32::from_ne_bytes([one, two, 7, 7])
            };
            let mut settings = [9; 11];
            (settings[3], settings[7]) = (half(low), half(high));
            assert_eq!(speed_in(&settings), speed);
        }
    }

    #[test]
    fn an_interface_says_whether_it_takes_super_packets_whole() {
        let pair = or_skip!(
            "ethtool::an_interface_says_whether_it_takes_super_packets_whole",
            needs(&["ethtool"]).and_then(|()| Pair::new())
        );
        let mut asked = pair.a.run(|| ask_of("v0"));
        assert!(takes_any(&asked), "a veth does: {asked:?}");
        let socket = pair.a.run(socket);
        for (change, whole) in [
            ("tx-udp-segmentation off", false),
            ("tx-udp-segmentation on", true),
            ("tx off", false),
            ("tx on", true),
            ("gso off", true),
        ] {
            pair.a.sh(&format!("ethtool -K v0 {change} >/dev/null 2>&1"));
            assert_eq!(takes_any(&asked), !whole || change == "gso off", "until it is asked");
            asked.refresh(socket.as_fd());
            assert_eq!(takes_any(&asked), whole, "{change}: {asked:?}");
            assert_eq!(asked.takes(1, 100), whole, "{change}: {asked:?}");
        }
        pair.a.sh("ip link set v0 down; ip link set v0 name renamed");
        asked.refresh(socket.as_fd());
        assert!(takes_any(&asked), "it is found by its index: {asked:?}");
        pair.a.sh("ip link del renamed");
        asked.refresh(socket.as_fd());
        assert!(!asked.takes(1, 100) && asked.unanswered.is_none(), "it is gone: {asked:?}");
    }

    #[test]
    fn an_interface_says_how_long_super_packets_may_be() {
        let pair =
            or_skip!("ethtool::an_interface_says_how_long_super_packets_may_be", Pair::new());
        let mut asked = pair.a.run(|| ask_of("v0"));
        let socket = pair.a.run(socket);
        pair.a.sh("ip link set v0 gso_max_segs 8");
        asked.refresh(socket.as_fd());
        assert!(asked.takes(8, 65_535) && !asked.takes(9, 1000), "{asked:?}");
        pair.a.sh("ip link set v0 gso_max_segs 65535 gso_max_size 30000");
        asked.refresh(socket.as_fd());
        assert!(asked.takes(128, 29_999) && !asked.takes(2, 30_000), "{asked:?}");
    }

    #[test]
    fn without_an_answer_it_is_as_it_was() {
        let pair = or_skip!("ethtool::without_an_answer_it_is_as_it_was", Pair::new());
        let mut asked = pair.a.run(|| ask_of("v0"));
        for errno in [libc::ENODEV, libc::ENOMEM] {
            asked.update(Err(io::Error::from_raw_os_error(errno)));
            assert!(takes_any(&asked) && !asked.is_unanswered(), "{asked:?}");
            asked.was_not_answered();
            assert!(asked.is_unanswered(), "it is asked again: {asked:?}");
            asked.refresh(pair.a.run(socket).as_fd());
            assert!(takes_any(&asked) && asked.unanswered.is_none(), "{asked:?}");
        }
        asked.update(Err(io::Error::from_raw_os_error(libc::EPERM)));
        assert!(!asked.takes(1, 100) && asked.unanswered.is_none(), "it may not ask: {asked:?}");
    }

    #[test]
    fn queues_are_counted_whatever_the_driver_says() {
        let channels = |rx, combined| [0, 9, 9, 9, 9, rx, 7, 7, combined];
        for (rx, combined, queues) in [
            (0, 0, None),
            (0, 4, Some(4)),
            (3, 4, Some(7)),
            (1, u32::MAX, Some(u32::MAX)),
            (u32::MAX, u32::MAX, Some(u32::MAX)),
        ] {
            assert_eq!(queues_in(&channels(rx, combined)), queues, "{rx} and {combined}");
        }
    }

    #[test]
    fn features_that_are_not_told_are_not_there() {
        let bits = |segmentation, any, each| Bits { segmentation, sum_any: any, sum_each: each };
        let mut features = vec![0; FEATURES_HEADER_WORDS + 2 * BLOCK_WORDS];
        for (bit, block) in [(0, 0), (31, 0), (32, 1), (63, 1)] {
            features[FEATURES_HEADER_WORDS + block * BLOCK_WORDS + ACTIVE] |= 1 << (bit % 32);
        }
        for (bits, on) in [
            (bits(0, Some(63), [None; 2]), true),
            (bits(31, None, [Some(0), Some(32)]), true),
            (bits(63, None, [Some(0), Some(1)]), false),
            (bits(63, None, [Some(0), None]), false),
            (bits(63, None, [None; 2]), false),
            (bits(1, Some(0), [None; 2]), false),
            (bits(64, Some(0), [None; 2]), false),
            (bits(1 << 40, Some(0), [None; 2]), false),
            (bits(0, Some(1 << 40), [None; 2]), false),
        ] {
            assert_eq!(bits.are_set_in(&features), on, "{bits:?}");
            assert!(!bits.are_set_in(&[]), "nothing was reported");
        }
    }

    #[test]
    fn what_is_not_there_says_nothing() {
        let nobody = Segmentation::new(socket().as_fd(), u32::MAX >> 1).expect("netlink");
        assert!(!nobody.takes(1, 100));
        assert_eq!(receive_queues("no-such-if"), None);
        assert_eq!(receive_queues("a-name-that-is-too-long"), None);
    }
}
