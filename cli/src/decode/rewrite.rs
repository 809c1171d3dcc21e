//! Writes packets as a wire would carry them: the packets of a super-packet as frames of their own.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use etherparse::checksum::Sum16BitWords;
use etherparse::{UdpHeader, ip_number};
use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::PcapNgBlock;
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::pcapng::blocks::interface_statistics::{
    InterfaceStatisticsBlock, InterfaceStatisticsOption,
};
use pcap_file::{DataLink, PcapError};
use rocinante_netdev::Run;
use rocinante_wire::IpFields;

use super::check::{Piece, is_numbered};
use super::file::Frame;
use super::frame::{Datagram, LinkType, Obstacle, UDP_LEN};

/// Length of the fixed IPv6 header.
const IPV6_LEN: usize = 40;

/// Bytes that are handed to the kernel at once. More leave the processor's cache before.
const BUFFER: usize = 128 << 10;

/// The type of an enhanced packet block, and its bytes beside the packet's.
const PACKET_BLOCK: u32 = 6;
const PACKET_BLOCK_LEN: usize = 32;

/// A pcapng file that is being written.
pub struct Rewriter {
    writer: PcapNgWriter<BufWriter<File>>,
    /// The link type of each interface of the file.
    links: Vec<LinkType>,
    /// A packet of a super-packet.
    packet: Vec<u8>,
}

impl Rewriter {
    /// Creates the file. Error: it cannot be created or written to, or is the file that is read.
    pub fn create(path: &Path, source: &Path) -> io::Result<Self> {
        let source = if source.as_os_str() == "-" { Path::new("/dev/stdin") } else { source };
        let [read, written] = [source, path].map(|path| {
            let file = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
            Some((file.dev(), file.ino()))
        });
        if read.is_some() && read == written {
            return Err(io::Error::other("it is the file that is read: give another name"));
        }
        let buffered = BufWriter::with_capacity(BUFFER, File::create(path)?);
        let writer = PcapNgWriter::new(buffered).map_err(other)?;
        Ok(Self { writer, links: Vec::new(), packet: Vec::new() })
    }

    /// Writes one packet of a frame. Error: the file cannot be written to.
    pub fn write(
        &mut self,
        frame: &Frame<'_>,
        datagram: &Datagram<'_>,
        piece: &Piece<'_>,
    ) -> io::Result<()> {
        let whole = wire_frame(frame.data, datagram, piece);
        let missing = datagram.len - datagram.captured.len();
        self.put(frame, &whole, whole.len() + missing)
    }

    /// Writes the packets of a frame that are wanted, by their bytes from the BTH on. They are
    /// those of `run`, if it is a super-packet. Writes at most the first `snap` bytes of each, and
    /// returns their number. ICRCs are not looked at, and the UDP checksum of a packet that is cut
    /// off is none, unless it was there. Error: the file cannot be written to.
    pub fn write_run(
        &mut self,
        frame: &Frame<'_>,
        datagram: &Datagram<'_>,
        run: Option<Run>,
        snap: Option<u32>,
        is_wanted: impl Fn(&[u8]) -> bool,
    ) -> io::Result<u64> {
        let snap = snap.map_or(usize::MAX, |snap| snap as usize);
        let alone = Run { datagram: usize::MAX, apart: usize::MAX };
        let Run { datagram: size, apart } = run.unwrap_or(alone);
        // Beginnings lie further apart than the headers of the whole say, where there is room for
        // more than a datagram has.
        let taken = match run {
            Some(_) => frame.data.get(datagram.udp_at + UDP_LEN..).unwrap_or_default(),
            None => datagram.captured,
        };
        let packets = taken.chunks(apart.max(1)).enumerate().map(|(nth, it)| {
            let len = size.min(datagram.len.saturating_sub(nth.saturating_mul(size)));
            (nth, &it[..it.len().min(len)], len)
        });
        // Headers may say less than the kernel.
        let packets = packets.filter(|(.., len)| *len > 0);
        let second = packets.clone().nth(1);
        let Some((_, second, second_len)) = second else {
            if !is_wanted(datagram.captured) {
                return Ok(0);
            }
            let missing = datagram.len - datagram.captured.len();
            let whole = match missing > 0 || frame.data.len() > snap {
                true => without_half_checksum(frame.data, datagram),
                false => with_checksum(frame.data, datagram),
            };
            let kept = &whole[..whole.len().min(snap)];
            self.put(frame, kept, whole.len() + missing)?;
            return Ok(1);
        };
        let numbered = second.len() < second_len || is_numbered(datagram, second);
        let mut packet = std::mem::take(&mut self.packet);
        let mut count = 0;
        let mut packets = packets.filter(|(_, captured, _)| is_wanted(captured));
        let written = packets.try_for_each(|(nth, captured, len)| {
            let ip_id = match datagram.ip {
                IpFields::V4 { id, .. } if numbered => Some(id.wrapping_add(nth as u16)),
                _ => None,
            };
            count += 1;
            let len = cut_into(&mut packet, frame.data, datagram, (captured, len, ip_id), snap);
            self.put(frame, &packet, len)
        });
        self.packet = packet;
        written.map(|()| count)
    }

    /// Writes a packet of which these bytes are kept.
    fn put(&mut self, frame: &Frame<'_>, kept: &[u8], len: usize) -> io::Result<()> {
        let interface = match self.links.iter().position(|link| *link == frame.link) {
            Some(interface) => interface,
            None => self.describe(frame.link, 0, None)?,
        };
        let time = frame.time_ns.and_then(|ns| u64::try_from(ns).ok()).unwrap_or(0);
        let padding = kept.len().next_multiple_of(4) - kept.len();
        let block_len = (PACKET_BLOCK_LEN + kept.len() + padding) as u32;
        let words = [
            PACKET_BLOCK,
            block_len,
            interface as u32,
            (time >> 32) as u32,
            time as u32,
            kept.len() as u32,
            u32::try_from(len).unwrap_or(u32::MAX),
        ];
        // The library writes a block twice, word for word, the first time to learn its length.
        let to = self.writer.get_mut();
        to.write_all(words.map(u32::to_ne_bytes).as_flattened())?;
        to.write_all(kept)?;
        to.write_all(&[0; 3][..padding])?;
        to.write_all(&block_len.to_ne_bytes())
    }

    /// Begins an interface of this link type, with a limit of bytes (0 for none) and perhaps a name
    /// and a comment. Error: the file cannot be written to.
    pub fn describe(
        &mut self,
        link: LinkType,
        snaplen: u32,
        named: Option<(&str, &str)>,
    ) -> io::Result<usize> {
        let mut options = vec![InterfaceDescriptionOption::IfTsResol(9)];
        if let Some((name, comment)) = named {
            options.push(InterfaceDescriptionOption::IfName(name.into()));
            options.push(InterfaceDescriptionOption::Comment(comment.into()));
        }
        let linktype = DataLink::from(link.0);
        let block = InterfaceDescriptionBlock { linktype, snaplen, options };
        self.writer.write_block(&block.into_block()).map_err(other)?;
        self.links.push(link);
        Ok(self.links.len() - 1)
    }

    /// Writes what the first interface received and dropped in all, with a comment. Error: the file
    /// cannot be written to.
    pub fn statistics(&mut self, received: u64, dropped: u64, comment: &str) -> io::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let block = InterfaceStatisticsBlock {
            interface_id: 0,
            timestamp: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
            options: vec![
                InterfaceStatisticsOption::IsbIfRecv(received),
                InterfaceStatisticsOption::IsbIfDrop(dropped),
                InterfaceStatisticsOption::Comment(comment.into()),
            ],
        };
        self.writer.write_block(&block.into_block()).map_err(other).map(drop)
    }

    /// Hands the buffered bytes to the kernel. Error: the file cannot be written to.
    pub fn flush(&mut self) -> io::Result<()> {
        self.writer.get_mut().flush()
    }
}

fn other(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(error) => error,
        error => io::Error::other(error.to_string()),
    }
}

/// The frame of one packet. That of a packet which is alone in its frame is as captured, but for a
/// UDP checksum that the kernel had left to the device. Others get the headers of the super-packet
/// with their own lengths, identification and checksums; BTH, PSN and ICRC are their own already.
#[must_use]
pub fn wire_frame<'a>(
    frame: &'a [u8],
    datagram: &Datagram<'_>,
    piece: &Piece<'_>,
) -> Cow<'a, [u8]> {
    if piece.index.is_none() {
        return with_checksum(frame, datagram);
    }
    let mut out = Vec::new();
    let payload = (piece.captured, piece.captured.len(), piece.ip_id);
    cut_into(&mut out, frame, datagram, payload, usize::MAX);
    Cow::Owned(out)
}

/// At most `snap` bytes of the frame of a packet of a super-packet, with these bytes from the BTH
/// on, the length of all from there on, and this identification. Returns the length of the frame.
fn cut_into(
    out: &mut Vec<u8>,
    frame: &[u8],
    datagram: &Datagram<'_>,
    (captured, payload, ip_id): (&[u8], usize, Option<u16>),
    snap: usize,
) -> usize {
    let (ip, udp) = (datagram.ip_at, datagram.udp_at);
    let len = udp + UDP_LEN + payload;
    out.clear();
    out.extend_from_slice(&frame[..udp + UDP_LEN]);
    out.extend_from_slice(&captured[..captured.len().min(snap.saturating_sub(udp + UDP_LEN))]);
    // A piece is a part of a super-packet, whose length has 16 bits.
    let udp_len = u16::try_from(UDP_LEN + payload).unwrap_or(u16::MAX);
    out[udp + 4..udp + 6].copy_from_slice(&udp_len.to_be_bytes());
    if out[udp + 6..udp + 8] != [0, 0] {
        let is_cut = len > snap || captured.len() < payload;
        let checksum = if is_cut { 0 } else { udp_checksum(datagram, udp_len, captured) };
        out[udp + 6..udp + 8].copy_from_slice(&checksum.to_be_bytes());
    }
    let headers = u16::try_from(udp - ip).unwrap_or(u16::MAX);
    if matches!(datagram.ip, IpFields::V6 { .. }) {
        let len = (headers - IPV6_LEN as u16).saturating_add(udp_len);
        out[ip + 4..ip + 6].copy_from_slice(&len.to_be_bytes());
    } else {
        out[ip + 2..ip + 4].copy_from_slice(&headers.saturating_add(udp_len).to_be_bytes());
        if let Some(id) = ip_id {
            out[ip + 4..ip + 6].copy_from_slice(&id.to_be_bytes());
        }
        out[ip + 10..ip + 12].fill(0);
        let checksum = Sum16BitWords::new().add_slice(&out[ip..udp]).ones_complement();
        // The sum is of words as they are in memory.
        out[ip + 10..ip + 12].copy_from_slice(&checksum.to_ne_bytes());
    }
    out.truncate(snap);
    len
}

/// The frame, with the UDP checksum if the kernel had left it to the device.
fn with_checksum<'a>(frame: &'a [u8], datagram: &Datagram<'_>) -> Cow<'a, [u8]> {
    match left_checksum(frame, datagram) {
        Some(length) if datagram.captured.len() == datagram.len => {
            with_field(frame, datagram, udp_checksum(datagram, length, datagram.captured))
        }
        _ => Cow::Borrowed(frame),
    }
}

/// The frame, without a UDP checksum that the kernel had left to the device.
fn without_half_checksum<'a>(frame: &'a [u8], datagram: &Datagram<'_>) -> Cow<'a, [u8]> {
    match left_checksum(frame, datagram) {
        Some(_) => with_field(frame, datagram, 0),
        None => Cow::Borrowed(frame),
    }
}

fn with_field<'a>(frame: &[u8], datagram: &Datagram<'_>, checksum: u16) -> Cow<'a, [u8]> {
    let mut out = frame.to_vec();
    out[datagram.udp_at + 6..datagram.udp_at + 8].copy_from_slice(&checksum.to_be_bytes());
    Cow::Owned(out)
}

/// The UDP length, if the kernel had left the checksum to the device: then the field has the sum of
/// the pseudo-header, not inverted (Linux's `CHECKSUM_PARTIAL`).
fn left_checksum(frame: &[u8], datagram: &Datagram<'_>) -> Option<u16> {
    let is_plain = matches!(datagram.obstacle, None | Some(Obstacle::Cut));
    let field = datagram.udp_at + 6..datagram.udp_at + 8;
    let length = u16::try_from(UDP_LEN + datagram.len).ok()?;
    let mut sum =
        Sum16BitWords::new().add_2bytes([0, ip_number::UDP.0]).add_2bytes(length.to_be_bytes());
    let sum = match datagram.ip {
        IpFields::V4 { src, dst, .. } => sum.add_4bytes(src.octets()).add_4bytes(dst.octets()),
        IpFields::V6 { src, dst } => sum.add_16bytes(src.octets()).add_16bytes(dst.octets()),
    };
    // The sum is of words as they are in memory.
    let left = (!sum.ones_complement()).to_ne_bytes();
    (is_plain && frame[field] == left).then_some(length)
}

fn udp_checksum(datagram: &Datagram<'_>, length: u16, payload: &[u8]) -> u16 {
    let header = UdpHeader {
        source_port: datagram.src_port,
        destination_port: super::frame::ROCE_PORT,
        length,
        checksum: 0,
    };
    let checksum = match datagram.ip {
        IpFields::V4 { src, dst, .. } => {
            header.calc_checksum_ipv4_raw(src.octets(), dst.octets(), payload)
        }
        IpFields::V6 { src, dst } => {
            header.calc_checksum_ipv6_raw(src.octets(), dst.octets(), payload)
        }
    };
    // Only payloads longer than a datagram's have none.
    checksum.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::frame::roce_datagram;

    /// Super-packets of datagrams of these lengths as `capture --snap` takes them: the beginnings
    /// lie 214 bytes apart.
    #[test]
    fn beginnings_of_short_datagrams_are_all_written() {
        const APART: usize = 214;
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let mut to = Rewriter::create(&path, std::path::Path::new("/dev/null")).unwrap();
        for v6 in [false, true] {
            for (each, last) in [(80, 80), (20, 20), (80, 24)] {
                let payload = 59 * each + last;
                let builder = etherparse::PacketBuilder::ethernet2([2; 6], [4; 6]);
                let builder = match v6 {
                    false => builder.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64),
                    true => builder.ipv6([1; 16], [2; 16], 64),
                };
                let mut data = Vec::new();
                let builder = builder.udp(4791, 4791);
                builder.write(&mut data, &vec![0; payload]).unwrap();
                data.truncate(data.len() - payload);
                for nth in 0..60 {
                    let len = if nth == 59 { last } else { each };
                    data.extend(vec![nth as u8; len]);
                    if nth < 59 {
                        data.resize(data.len() + APART - len, 0xee);
                    }
                }
                let frame = Frame { number: 1, time_ns: Some(1), link: LinkType(1), data: &data };
                let Ok(Some(datagram)) = roce_datagram(frame.link, frame.data) else {
                    panic!("a datagram");
                };
                let run = Some(Run { datagram: each, apart: APART });
                let mut write = |is_wanted: fn(&[u8]) -> bool| {
                    to.write_run(&frame, &datagram, run, Some(256), is_wanted).unwrap()
                };
                let counts = [write(|it| it[0] != 17), write(|it| it[0] == 18), write(|_| false)];
                assert_eq!(counts, [59, 1, 0]);
            }
        }
        to.flush().unwrap();
        drop(to);
        let file = fs::read(&path).unwrap();
        // Each packet begins with its own number, in its own length.
        for nth in 0..60_u8 {
            let at = file.windows(20).filter(|it| it.iter().all(|byte| *byte == nth)).count();
            assert_eq!(at > 0, nth != 17, "{nth}");
        }
        assert!(!file.windows(4).any(|it| it == [0xee; 4]));
    }
}
