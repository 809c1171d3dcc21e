//! The captures of another implementation in `tests/data/captures`, as RoCEv2 packets.

use std::fs::File;
use std::path::{Path, PathBuf};

use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use pcap_file::pcap::PcapReader;
use rocinante_stack::wire::icrc::Template;
use rocinante_stack::wire::{ICRC_LEN, IpFields};

/// The UDP destination port of RoCEv2.
const ROCE_PORT: u16 = 4791;

/// The directory of test data.
#[must_use]
pub fn data_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data")
}

/// A RoCEv2 packet of a capture.
#[derive(Debug, Clone)]
pub struct Captured {
    /// Name of the file, without its extension.
    pub file: String,
    /// Number of the packet in its file, from 1.
    pub number: usize,
    /// The fields of the IP header that the ICRC covers.
    pub ip: IpFields,
    /// UDP source port.
    pub src_port: u16,
    /// The UDP payload: from the BTH to the ICRC.
    pub bytes: Vec<u8>,
}

impl Captured {
    /// The masked headers of the packet.
    #[must_use]
    pub fn template(&self) -> Template {
        Template::new(&self.ip, self.src_port)
    }

    /// The ICRC in the packet. Panics if the packet is shorter than 4 bytes.
    #[must_use]
    pub fn found_icrc(&self) -> u32 {
        u32::from_le_bytes(*self.bytes.last_chunk::<ICRC_LEN>().expect("an ICRC"))
    }
}

/// The capture files, by name. Panics if the directory cannot be read.
#[must_use]
pub fn files() -> Vec<PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(data_dir().join("captures"))
        .expect("the directory of captures")
        .map(|entry| entry.expect("a directory entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "pcap"))
        .collect();
    files.sort();
    files
}

/// The RoCEv2 packets of one capture. Panics if the capture cannot be read.
#[must_use]
pub fn packets(path: &Path) -> Vec<Captured> {
    let mut reader = PcapReader::new(File::open(path).expect("a capture")).expect("a capture");
    let file = path.file_stem().expect("a name").to_string_lossy().into_owned();
    let mut found = Vec::new();
    let mut number = 0;
    while let Some(packet) = reader.next_packet() {
        number += 1;
        let frame = packet.expect("a whole packet").data;
        if let Some((ip, src_port, bytes)) = roce(&frame) {
            found.push(Captured { file: file.clone(), number, ip, src_port, bytes });
        }
    }
    found
}

/// The RoCEv2 packets of all captures, 1,568 of them.
#[must_use]
pub fn all() -> Vec<Captured> {
    files().iter().flat_map(|path| packets(path)).collect()
}

/// The parts of a frame, if it is a whole RoCEv2 packet.
fn roce(frame: &[u8]) -> Option<(IpFields, u16, Vec<u8>)> {
    let sliced = SlicedPacket::from_ethernet(frame).ok()?;
    let TransportSlice::Udp(udp) = sliced.transport? else { return None };
    if udp.destination_port() != ROCE_PORT {
        return None;
    }
    let ip = match sliced.net? {
        NetSlice::Ipv4(ip) => {
            let header = ip.header();
            let flags = &header.slice()[6..8];
            IpFields::V4 {
                src: header.source_addr(),
                dst: header.destination_addr(),
                id: header.identification(),
                flags: u16::from_be_bytes([flags[0], flags[1]]),
            }
        }
        NetSlice::Ipv6(ip) => {
            IpFields::V6 { src: ip.header().source_addr(), dst: ip.header().destination_addr() }
        }
        NetSlice::Arp(_) => return None,
    };
    Some((ip, udp.source_port(), udp.payload().to_vec()))
}
