//! The messages of perftest's programs, byte by byte.
//!
//! Texts end with zeros, numbers are big-endian. Both sides send every message, the client first.
//! The keys of a queue pair are a text over TCP, and a C structure over a queue pair:
//!
//! | bytes | |
//! |---|---|
//! | 0..4, 4..8, 8..12, 12..16, 16..20 | LID, READs and atomics at a time, QPN, PSN, key |
//! | 20..24 | whatever was in the memory there |
//! | 24..32, 32..48 | address, GID |
//! | 48..52, 52..56 | number of a shared receive queue, index of the GID: not read |

use std::str;

use rocinante::verbs::Mtu;

use crate::compat::wire::{hex, printable};

/// Bytes of a version.
pub const VERSION_LEN: usize = 16;
/// The version that this side sends: that of perftest 4.5-0.17.
pub const VERSION: &[u8; VERSION_LEN] = b"6.06\0\0\0\0\0\0\0\0\0\0\0\0";
/// Bytes of a path MTU.
pub const MTU_LEN: usize = 2;
/// Bytes of a queue pair's keys, as a text.
pub const KEYS_LEN: usize = 108;
/// Bytes of a queue pair's keys, as a structure.
pub const BINARY_LEN: usize = 56;
/// The last message of each side over TCP.
pub const DONE: &[u8; 5] = b"done\0";

/// Older versions exchange other messages.
const VERSION_MIN: f64 = 5.70;
/// The largest page and the longest cache line of any machine that Linux supports, rounded up.
const BUFFER_MAX: u32 = 1 << 20;
const LINE_MAX: u32 = 4096;

/// The peer's version.
///
/// # Errors
/// The message is no version, or the version is too old.
pub fn version(message: &[u8; VERSION_LEN]) -> Result<String, String> {
    let text = text(message).filter(|text| !text.is_empty());
    let number = text.and_then(|text| text.parse::<f64>().ok()).filter(|number| number.is_finite());
    let (Some(text), Some(number)) = (text, number) else {
        return Err(format!(
            "{:?} is no version: is it perftest's program that listens on this port (-p)?",
            printable(message)
        ));
    };
    if number < VERSION_MIN {
        return Err(format!("it has version {text}: perftest 4.5 or later speaks this exchange"));
    }
    Ok(text.to_owned())
}

/// Reads a page size. The messages of a queue pair cycle through the larger of both sides' pages.
///
/// # Errors
/// No machine has such pages.
pub fn cycle_buffer(message: [u8; 4]) -> Result<u32, String> {
    let bytes = u32::from_be_bytes(message);
    if bytes.is_power_of_two() && (512..=BUFFER_MAX).contains(&bytes) {
        return Ok(bytes);
    }
    Err(format!("it has pages of {bytes} bytes, as no machine has"))
}

/// Reads the length of a cache line. Messages are at least the larger of both sides' cache lines
/// apart.
///
/// # Errors
/// No machine has such cache lines.
pub fn cache_line(message: [u8; 4]) -> Result<u32, String> {
    let bytes = u32::from_be_bytes(message);
    if bytes.is_power_of_two() && (8..=LINE_MAX).contains(&bytes) {
        return Ok(bytes);
    }
    Err(format!("it has cache lines of {bytes} bytes, as no machine has"))
}

/// The message for a path MTU: libibverbs' code of it, as a digit.
#[must_use]
pub fn mtu_message(mtu: Mtu) -> [u8; MTU_LEN] {
    let code = match mtu {
        Mtu::Mtu256 => b'1',
        Mtu::Mtu512 => b'2',
        Mtu::Mtu1024 => b'3',
        Mtu::Mtu2048 => b'4',
        Mtu::Mtu4096 => b'5',
    };
    [code, 0]
}

/// The peer's path MTU.
///
/// # Errors
/// The message is no path MTU.
pub fn mtu(message: [u8; MTU_LEN]) -> Result<Mtu, String> {
    match &message {
        b"1\0" => Ok(Mtu::Mtu256),
        b"2\0" => Ok(Mtu::Mtu512),
        b"3\0" => Ok(Mtu::Mtu1024),
        b"4\0" => Ok(Mtu::Mtu2048),
        b"5\0" => Ok(Mtu::Mtu4096),
        other => Err(format!("{:?} is no code of a path MTU", printable(other))),
    }
}

/// The keys of a queue pair: its address and its memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Keys {
    /// READs and atomics in flight that it takes.
    pub out_reads: u32,
    /// Its number: 24 bits.
    pub qpn: u32,
    /// The first PSN that it sends: 24 bits.
    pub psn: u32,
    /// The key of the memory.
    pub rkey: u32,
    /// The address of the memory.
    pub address: u64,
    /// The queue pair's GID.
    pub gid: [u8; 16],
}

impl Keys {
    /// The message as a text. It has no LID, because Ethernet has none, and no number of a shared
    /// receive queue.
    #[must_use]
    pub fn message(&self) -> [u8; KEYS_LEN] {
        let Self { out_reads, qpn, psn, rkey, address, gid } = self;
        let out_reads = out_reads & 0xffff;
        let mut text =
            format!("0000:{out_reads:04x}:{qpn:06x}:{psn:06x}:{rkey:08x}:{address:016x}:");
        gid.iter().for_each(|byte| text.push_str(&format!("{byte:02x}:")));
        text.push_str("00000000:\0");
        text.as_bytes().try_into().expect("every field has its width")
    }

    /// Reads a message that is a text.
    ///
    /// # Errors
    /// The bytes have another format.
    pub fn parse(message: &[u8; KEYS_LEN]) -> Result<Self, String> {
        let wrong = |why: String| format!("{:?} is no address: {why}", printable(message));
        let Some(text) = text(message) else {
            return Err(wrong("it is no text that ends with a zero".to_owned()));
        };
        let fields: Vec<&str> = text.split(':').collect();
        // LID, READs, QPN, PSN, key, address, GID, SRQ, and nothing after the last colon.
        let [lid, out_reads, qpn, psn, rkey, address, bytes @ .., srq, ""] = &fields[..] else {
            return Err(wrong("it does not end with a colon".to_owned()));
        };
        if bytes.len() != 16 {
            return Err(wrong(format!("its GID has {} bytes", bytes.len())));
        }
        let number = |text: &str, max: u64| hex(text, max).map_err(wrong);
        let mut gid = [0; 16];
        for (byte, text) in gid.iter_mut().zip(bytes) {
            *byte = number(text, 0xff)? as u8;
        }
        number(lid, 0xffff)?;
        number(srq, u32::MAX.into())?;
        Ok(Self {
            out_reads: number(out_reads, 0xffff)? as u32,
            qpn: number(qpn, 0xff_ffff)? as u32,
            psn: number(psn, 0xff_ffff)? as u32,
            rkey: number(rkey, u32::MAX.into())? as u32,
            address: number(address, u64::MAX)?,
            gid,
        })
    }

    /// The message as a structure.
    #[must_use]
    pub fn binary(&self) -> [u8; BINARY_LEN] {
        let Self { out_reads, qpn, psn, rkey, address, gid } = self;
        let mut message = [0; BINARY_LEN];
        for (index, number) in [0, *out_reads, *qpn, *psn, *rkey].into_iter().enumerate() {
            message[index * 4..][..4].copy_from_slice(&number.to_be_bytes());
        }
        message[24..32].copy_from_slice(&address.to_be_bytes());
        message[32..48].copy_from_slice(gid);
        message
    }

    /// Reads a message that is a structure.
    ///
    /// # Errors
    /// A number is out of range.
    pub fn parse_binary(message: &[u8; BINARY_LEN]) -> Result<Self, String> {
        let part = |at: usize| <[u8; 4]>::try_from(&message[at..at + 4]).expect("four bytes");
        let number = |at: usize, max: u32, what: &str| match u32::from_be_bytes(part(at)) {
            number if number <= max => Ok(number),
            number => Err(format!("{number:#x} is no {what}")),
        };
        Ok(Self {
            out_reads: number(4, 0xffff, "number of READs")?,
            qpn: number(8, 0xff_ffff, "number of a queue pair")?,
            psn: number(12, 0xff_ffff, "PSN")?,
            rkey: number(16, u32::MAX, "key")?,
            address: u64::from_be_bytes(message[24..32].try_into().expect("eight bytes")),
            gid: message[32..48].try_into().expect("sixteen bytes"),
        })
    }
}

/// The results of one side, in its own units.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Report {
    /// Bytes of a message.
    pub size: u64,
    /// Messages of all queue pairs.
    pub iters: u64,
    /// The best stretch of the measurement.
    pub peak: f64,
    /// The average of the measurement.
    pub average: f64,
    /// 10⁶ messages per second.
    pub rate: f64,
}

/// Numbers of a report. Each is a message of its own.
pub const REPORT_PARTS: usize = 5;

impl Report {
    /// The messages of the report.
    #[must_use]
    pub fn parts(&self) -> [[u8; 8]; REPORT_PARTS] {
        let numbers =
            [self.peak, self.average, self.rate].map(|number| number.to_bits().to_be_bytes());
        let [peak, average, rate] = numbers;
        [self.size.to_be_bytes(), self.iters.to_be_bytes(), peak, average, rate]
    }

    /// Reads the messages of a report. A value that is not a number counts as 0.
    #[must_use]
    pub fn of(parts: [[u8; 8]; REPORT_PARTS]) -> Self {
        let [size, iters, peak, average, rate] = parts.map(u64::from_be_bytes);
        let number = |bits| Some(f64::from_bits(bits)).filter(|n| n.is_finite() && *n >= 0.0);
        let [peak, average, rate] = [peak, average, rate].map(|bits| number(bits).unwrap_or(0.0));
        Self { size, iters, peak, average, rate }
    }
}

/// The text before the first zero.
fn text(message: &[u8]) -> Option<&str> {
    let end = message.iter().position(|byte| *byte == 0)?;
    str::from_utf8(&message[..end]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compat::gid;
    use proptest::prelude::*;

    const KEYS: &[u8; KEYS_LEN] =
        b"0000:0080:000012:5b2c1f:00000d25:00007f3b8c001000:00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:02:00000000:\0";

    fn keys() -> Keys {
        Keys {
            out_reads: 128,
            qpn: 0x12,
            psn: 0x5b_2c1f,
            rkey: 0xd25,
            address: 0x7f3b_8c00_1000,
            gid: gid::of([10, 77, 0, 2].into()),
        }
    }

    #[test]
    fn keys_are_as_perftest_tells_them() {
        assert_eq!(&keys().message(), KEYS);
        assert_eq!(Keys::parse(KEYS), Ok(keys()));
    }

    #[test]
    fn a_structure_holds_the_same_keys() {
        let mut binary = keys().binary();
        assert_eq!(
            binary[..24],
            [
                0, 0, 0, 0, 0, 0, 0, 0x80, 0, 0, 0, 0x12, 0, 0x5b, 0x2c, 0x1f, 0, 0, 0x0d, 0x25, 0,
                0, 0, 0
            ]
        );
        assert_eq!(binary[24..32], [0, 0, 0x7f, 0x3b, 0x8c, 0, 0x10, 0]);
        assert_eq!(binary[32..], [&gid::of([10, 77, 0, 2].into())[..], &[0; 8]].concat());
        // A C structure may have any bytes in its holes and in its last numbers.
        binary[20..24].fill(0xee);
        binary[48..].fill(0xee);
        assert_eq!(Keys::parse_binary(&binary), Ok(keys()));
        for (at, what) in [(4, "READs"), (8, "queue pair"), (12, "PSN")] {
            let mut wrong = binary;
            wrong[at] = 1;
            assert!(Keys::parse_binary(&wrong).unwrap_err().contains(what));
        }
    }

    #[test]
    fn what_are_no_keys_is_refused() {
        for (at, byte) in [
            (0, b'x'),
            (4, b'0'),
            (106, b'0'),
            (107, b':'),
            (106, 0),
            (60, b':'),
            (0, 0),
            (50, 0xff),
        ] {
            let mut message = *KEYS;
            message[at] = byte;
            assert!(Keys::parse(&message).is_err(), "{}", printable(&message));
        }
    }

    #[test]
    fn versions_are_numbers_that_are_new_enough() {
        assert_eq!(version(VERSION).as_deref(), Ok("6.06"));
        assert_eq!(version(b"5.70\0\0\0\0\0\0\0\0\0\0\0\0").as_deref(), Ok("5.70"));
        let old = version(b"5.60\0\0\0\0\0\0\0\0\0\0\0\0").unwrap_err();
        assert!(old.contains("5.60") && old.contains("perftest 4.5"), "{old}");
        for bad in [
            b"GET / HTTP/1.1\r\n",
            b"\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
            b"nan\0\0\0\0\0\0\0\0\0\0\0\0\0",
            b"6.066.066.066.06",
        ] {
            assert!(version(bad).unwrap_err().contains("-p"), "{}", printable(bad));
        }
    }

    #[test]
    fn only_possible_machines_are_believed() {
        assert_eq!((cycle_buffer([0, 0, 16, 0]), cache_line([0, 0, 0, 64])), (Ok(4096), Ok(64)));
        for bad in [[0; 4], [255; 4], [0, 0, 16, 1], [127, 0, 0, 0]] {
            assert!(cycle_buffer(bad).is_err() && cache_line(bad).is_err());
        }
    }

    #[test]
    fn path_mtus_come_back() {
        for known in [Mtu::Mtu256, Mtu::Mtu512, Mtu::Mtu1024, Mtu::Mtu2048, Mtu::Mtu4096] {
            assert_eq!(mtu(mtu_message(known)), Ok(known));
        }
        for bad in [*b"0\0", *b"6\0", *b"33", [0, 0], [255, 0]] {
            assert!(mtu(bad).is_err());
        }
    }

    #[test]
    fn reports_come_back() {
        let report = Report { size: 64, iters: 5000, peak: 12.5, average: 11.25, rate: 0.5 };
        assert_eq!(Report::of(report.parts()), report);
        assert_eq!(report.parts()[1], [0, 0, 0, 0, 0, 0, 19, 136]);
        let nonsense = Report { peak: f64::NAN, average: -1.0, rate: f64::INFINITY, ..report };
        let read = Report::of(nonsense.parts());
        assert_eq!((read.peak, read.average, read.rate), (0.0, 0.0, 0.0));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), KEYS_LEN)) {
            let message: [u8; KEYS_LEN] = bytes.try_into().unwrap();
            let _ = Keys::parse(&message);
            if let Ok(keys) = Keys::parse_binary(message.first_chunk().unwrap()) {
                prop_assert_eq!(Keys::parse_binary(&keys.binary()), Ok(keys));
            }
            let _ = version(message.first_chunk().unwrap());
            let _ = (cycle_buffer(*message.first_chunk().unwrap()), cache_line(*message.first_chunk().unwrap()));
            let _ = mtu(*message.first_chunk().unwrap());
        }

        #[test]
        fn almost_keys_too(text in "[0-9a-f]{4}(:[0-9a-f]{1,16}){0,22}:{0,2}") {
            let mut message = [0; KEYS_LEN];
            let len = text.len().min(KEYS_LEN - 1);
            message[..len].copy_from_slice(&text.as_bytes()[..len]);
            if let Ok(keys) = Keys::parse(&message) {
                prop_assert_eq!(Keys::parse(&keys.message()), Ok(keys));
            }
        }
    }
}
