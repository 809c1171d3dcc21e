//! Capture files, pcap and pcapng, read as a stream of frames.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pcap_file::pcap::PcapReader;
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::pcapng::{PcapNgReader, RawBlock};
use pcap_file::{Endianness, PcapError, TsResolution};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::frame::LinkType;
use crate::ending;

/// One record of a capture file.
#[derive(Debug, Clone, Copy)]
pub struct Frame<'a> {
    /// Number in the file, from 1.
    pub number: u64,
    /// Nanoseconds since 1970, where the file has the time.
    pub time_ns: Option<i128>,
    /// The type of the first header.
    pub link: LinkType,
    /// The captured bytes.
    pub data: &'a [u8],
}

/// Why reading ended before the end of the file.
#[derive(Debug)]
pub enum ReadError {
    /// The file cannot be opened or read.
    Io(io::Error),
    /// The file has no bytes.
    Empty,
    /// The file begins with these bytes, so it is no capture.
    Magic([u8; 4]),
    /// The file is cut off or damaged.
    Damaged {
        /// Frames read before.
        after: u64,
        /// The fault.
        what: String,
    },
    /// The receiver of the frames reported this error.
    Sink(io::Error),
    /// The copy with this name cannot be written.
    Copy(PathBuf, io::Error),
}

impl From<io::Error> for ReadError {
    /// An error of the receiver of frames.
    fn from(error: io::Error) -> Self {
        Self::Sink(error)
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "cannot be read: {error}"),
            Self::Empty => f.write_str("is empty"),
            Self::Magic(magic) => {
                let [a, b, c, d] = magic;
                write!(
                    f,
                    "is neither pcap nor pcapng (it begins with {a:02x} {b:02x} {c:02x} {d:02x})"
                )?;
                f.write_str(match magic {
                    [0x1f, 0x8b, ..] => ": it is compressed: gunzip it first",
                    [0x28, 0xb5, 0x2f, 0xfd] => ": it is compressed: unzstd it first",
                    [0xfd, b'7', b'z', b'X'] => ": it is compressed: unxz it first",
                    [0x34, 0xcd, 0xb2, 0xa1] | [0xa1, 0xb2, 0xcd, 0x34] => {
                        ": it is a modified pcap: convert it with `editcap -F pcapng`"
                    }
                    _ => "; captures are made with `tcpdump -w FILE udp port 4791`",
                })
            }
            Self::Damaged { after, what } => {
                write!(f, "is cut off or damaged after packet {after}: {what}")
            }
            Self::Sink(error) => write!(f, "output: {error}"),
            Self::Copy(path, error) => {
                write!(f, "{} cannot be written: {error}", path.display())
            }
        }
    }
}

impl std::error::Error for ReadError {}

/// Reads a capture file and gives each frame to `sink`. The path `-` means the standard input.
/// Error: [`ReadError`]. `sink` has got the frames before it.
pub fn read<E: Into<ReadError>>(
    path: &Path,
    sink: impl FnMut(Frame<'_>) -> Result<(), E>,
) -> Result<(), ReadError> {
    read_live(path, &|| {}, sink)
}

/// As [`read`], and calls `idle` before it waits for more of the file. A signal ends the file.
pub fn read_live<E: Into<ReadError>>(
    path: &Path,
    idle: &dyn Fn(),
    mut sink: impl FnMut(Frame<'_>) -> Result<(), E>,
) -> Result<(), ReadError> {
    let file = if path.as_os_str() == "-" {
        // Without a buffer between, which could hold bytes that `poll` does not see.
        io::stdin().as_fd().try_clone_to_owned().map(File::from)
    } else {
        File::open(path)
    };
    let mut source = Live { file: file.map_err(ReadError::Io)?, idle };
    let magic = read_magic(&mut source)?;
    let source = magic.chain(source);
    match magic {
        [0x0a, 0x0d, 0x0d, 0x0a] => read_pcapng(source, &mut sink),
        [0xa1, 0xb2, 0xc3, 0xd4]
        | [0xd4, 0xc3, 0xb2, 0xa1]
        | [0xa1, 0xb2, 0x3c, 0x4d]
        | [0x4d, 0x3c, 0xb2, 0xa1] => read_pcap(source, &mut sink),
        magic => Err(ReadError::Magic(magic)),
    }
}

/// A file that may be a pipe to which a capture is still being written.
struct Live<'a> {
    file: File,
    idle: &'a dyn Fn(),
}

impl Read for Live<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut patience = Duration::ZERO;
        loop {
            if ending::signal().is_some() {
                return Ok(0);
            }
            let mut polled = [PollFd::new(&self.file, PollFlags::IN)];
            let limit = Timespec::try_from(patience).map_err(io::Error::other)?;
            match poll(&mut polled, Some(&limit)) {
                Ok(0) => {
                    (self.idle)();
                    patience = ending::LOOK;
                }
                Err(Errno::INTR) => {}
                // A file that cannot be polled is read: the read reports its error.
                Ok(_) | Err(_) => return self.file.read(buffer),
            }
        }
    }
}

/// Reads the first four bytes. Fills up a file of one to three bytes with zeros, which makes no
/// capture's magic.
fn read_magic(source: &mut impl Read) -> Result<[u8; 4], ReadError> {
    let mut magic = [0; 4];
    let mut len = 0;
    while len < magic.len() {
        match source.read(&mut magic[len..]) {
            Ok(0) if len == 0 => return Err(ReadError::Empty),
            Ok(0) => break,
            Ok(n) => len += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ReadError::Io(error)),
        }
    }
    Ok(magic)
}

fn read_pcap<E: Into<ReadError>>(
    source: impl Read,
    sink: &mut impl FnMut(Frame<'_>) -> Result<(), E>,
) -> Result<(), ReadError> {
    let mut reader = PcapReader::new(source).map_err(|error| damaged(0, error))?;
    let header = reader.header();
    let link = LinkType(u32::from(header.datalink) & 0xffff);
    let tick_ns = match header.ts_resolution {
        TsResolution::MicroSecond => 1000,
        TsResolution::NanoSecond => 1,
    };
    let mut number = 0;
    // Raw records, because the checked ones refuse a frame that is longer than the snapshot length.
    while let Some(record) = reader.next_raw_packet() {
        let record = record.map_err(|error| damaged(number, error))?;
        number += 1;
        let time_ns =
            i128::from(record.ts_sec) * 1_000_000_000 + i128::from(record.ts_frac) * tick_ns;
        sink(Frame { number, time_ns: Some(time_ns), link, data: &record.data })
            .map_err(Into::into)?;
    }
    Ok(())
}

fn read_pcapng<E: Into<ReadError>>(
    source: impl Read,
    sink: &mut impl FnMut(Frame<'_>) -> Result<(), E>,
) -> Result<(), ReadError> {
    let mut reader = PcapNgReader::new(source).map_err(|error| damaged(0, error))?;
    let mut number = 0;
    // Raw blocks, because the parsed ones know no time resolution and refuse options that some
    // writers do not terminate.
    while let Some(block) = reader.next_raw_block() {
        let RawBlock { type_, body, .. } = block.map_err(|error| damaged(number, error))?;
        let body = body.into_owned();
        let Some(record) = Record::of_block(type_, &body, reader.section().endianness) else {
            continue;
        };
        number += 1;
        let record = record.map_err(|what| ReadError::Damaged { after: number - 1, what })?;
        let interface = reader.interfaces().get(record.interface).ok_or_else(|| {
            let what = format!("it names interface {}, which the file lacks", record.interface);
            ReadError::Damaged { after: number - 1, what }
        })?;
        let data = match record.limited_by_snaplen && interface.snaplen != 0 {
            true => &record.data[..record.data.len().min(interface.snaplen as usize)],
            false => record.data,
        };
        let time_ns = record.ticks.and_then(|ticks| time_ns(ticks, interface));
        let link = LinkType(u32::from(interface.linktype));
        sink(Frame { number, time_ns, link, data }).map_err(Into::into)?;
    }
    Ok(())
}

/// A packet block of pcapng.
struct Record<'a> {
    interface: usize,
    ticks: Option<u64>,
    data: &'a [u8],
    limited_by_snaplen: bool,
}

impl<'a> Record<'a> {
    /// Parses a block. `None` for blocks that are no packets.
    fn of_block(kind: u32, body: &'a [u8], endianness: Endianness) -> Option<Result<Self, String>> {
        let word = |at: usize| -> Option<u32> {
            let bytes = *body.get(at..)?.first_chunk()?;
            Some(match endianness {
                Endianness::Big => u32::from_be_bytes(bytes),
                Endianness::Little => u32::from_le_bytes(bytes),
            })
        };
        let record = match kind {
            // Enhanced packet block: interface, time (high, low), captured and original length.
            6 => (|| {
                let data = body.get(20..)?.get(..word(12)? as usize)?;
                Some(Self::timed(word(0)? as usize, word(4)?, word(8)?, data))
            })(),
            // The obsolete packet block has a 16-bit interface and a drop count in its first word.
            2 => (|| {
                let data = body.get(20..)?.get(..word(12)? as usize)?;
                let interface = match endianness {
                    Endianness::Big => word(0)? >> 16,
                    Endianness::Little => word(0)? & 0xffff,
                };
                Some(Self::timed(interface as usize, word(4)?, word(8)?, data))
            })(),
            // Simple packet block: the original length only; the rest is data, padded.
            3 => (|| {
                let rest = body.get(4..)?;
                let data = &rest[..rest.len().min(word(0)? as usize)];
                Some(Self { interface: 0, ticks: None, data, limited_by_snaplen: true })
            })(),
            _ => return None,
        };
        Some(record.ok_or_else(|| "a packet block is shorter than it says".to_owned()))
    }

    fn timed(interface: usize, high: u32, low: u32, data: &'a [u8]) -> Self {
        let ticks = u64::from(high) << 32 | u64::from(low);
        Self { interface, ticks: Some(ticks), data, limited_by_snaplen: false }
    }
}

/// The time in nanoseconds, by the interface's resolution (by default a microsecond) and offset.
fn time_ns(ticks: u64, interface: &InterfaceDescriptionBlock<'_>) -> Option<i128> {
    let (mut resolution, mut offset_s) = (6, 0);
    for option in &interface.options {
        match option {
            InterfaceDescriptionOption::IfTsResol(value) => resolution = *value,
            InterfaceDescriptionOption::IfTsOffset(value) => offset_s = value.cast_signed(),
            _ => {}
        }
    }
    let ticks = i128::from(ticks) * 1_000_000_000;
    let ns = match resolution {
        0x80.. => ticks >> (resolution & 0x7f),
        _ => ticks / 10i128.checked_pow(resolution.into())?,
    };
    Some(ns + i128::from(offset_s) * 1_000_000_000)
}

fn damaged(after: u64, error: PcapError) -> ReadError {
    match error {
        PcapError::IoError(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            ReadError::Damaged { after, what: "it ends in the middle of a record".to_owned() }
        }
        PcapError::IoError(error) => ReadError::Io(error),
        error => ReadError::Damaged { after, what: error.to_string() },
    }
}
