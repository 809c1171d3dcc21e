//! One line per packet.

use std::fmt;

use rocinante_stack::types::Pkey;
use rocinante_stack::wire::ext::rnr_timer_us;
use rocinante_stack::wire::{
    AckKind, Aeth, Bth, Ext, NakCode, Opcode, OpcodeInfo, Packet, WireError, bth,
};

use super::check::{Piece, Verdict};

/// A packet, as far as it can be read.
#[derive(Debug)]
pub struct Decoded<'a> {
    bth: Option<Bth>,
    info: Option<&'static OpcodeInfo>,
    /// Text of the extension headers that are completely in the file.
    headers: Vec<String>,
    payload_len: Option<usize>,
    error: Option<WireError>,
    piece: Piece<'a>,
}

impl<'a> Decoded<'a> {
    /// Reads the captured bytes. Bytes that the capture cut off count as zeros and are not shown.
    #[must_use]
    pub fn new(piece: Piece<'a>) -> Self {
        let bth = piece.captured.first_chunk::<{ bth::LEN }>().map(Bth::read);
        let mut decoded = Self {
            info: bth.and_then(|bth| bth.opcode.info()),
            bth,
            headers: Vec::new(),
            payload_len: None,
            error: None,
            piece,
        };
        if bth.is_none() {
            decoded.error = (piece.captured.len() == piece.len).then_some(WireError::Truncated);
            return decoded;
        }
        let mut filled = piece.captured.to_vec();
        filled.resize(piece.len, 0);
        match Packet::parse(&filled) {
            Ok(packet) => {
                let there = |ext: &&Ext| {
                    let end = packet.info.offset(**ext).map(|at| at + ext.size());
                    end.is_some_and(|end| end <= piece.captured.len())
                };
                let extensions = packet.info.extensions.iter().filter(there);
                decoded.headers = extensions.filter_map(|ext| header(&packet, *ext)).collect();
                decoded.payload_len = Some(packet.payload().len());
            }
            Err(error) => decoded.error = Some(error),
        }
        decoded
    }

    /// The opcode, if the whole BTH is in the file.
    #[must_use]
    pub fn opcode(&self) -> Option<Opcode> {
        self.bth.map(|bth| bth.opcode)
    }
}

/// Stands for the opcode of a packet without a BTH in the file.
pub const NO_BTH: &str = "NO_BTH";

/// The name of an opcode, such as `RC_SEND_ONLY`; a number such as `0xa4` if it is not in the
/// table.
#[must_use]
pub fn opcode_name(opcode: Opcode) -> String {
    opcode.info().map_or_else(|| format!("0x{:02x}", opcode.0), |info| info.name.to_owned())
}

impl fmt::Display for Decoded<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.bth, self.info) {
            (None, _) => f.write_str(NO_BTH)?,
            (Some(bth), None) => write!(f, "unknown opcode 0x{:02x}", bth.opcode.0)?,
            (Some(_), Some(info)) => f.write_str(info.name)?,
        }
        if let Some(bth) = &self.bth {
            write!(f, " qp {} psn {}", bth.dest_qpn, bth.psn)?;
            write_flags(f, bth)?;
        }
        for header in &self.headers {
            write!(f, " {header}")?;
        }
        match (self.payload_len, self.error) {
            (Some(len), _) => write!(f, " len {len}")?,
            // The opcode has been printed.
            (None, Some(WireError::UnknownOpcode(_))) => write!(f, " bytes {}", self.piece.len)?,
            (None, Some(error)) => write!(f, " bytes {} ({error})", self.piece.len)?,
            (None, None) => write!(f, " bytes {}", self.piece.len)?,
        }
        match self.piece.verdict {
            Verdict::Ok => f.write_str(" icrc ok"),
            Verdict::Bad { computed, found } => {
                write!(f, " icrc BAD computed 0x{computed:08x} found 0x{found:08x}")
            }
            Verdict::Unknown(why) => write!(f, " icrc unknown ({why})"),
        }
    }
}

/// Prints the flags as ` [SE,A]`, if any is set, and then each field with an unusual value.
fn write_flags(f: &mut fmt::Formatter<'_>, bth: &Bth) -> fmt::Result {
    let flags = [
        (bth.solicited, "SE"),
        (bth.mig_req, "M"),
        (bth.ack_req, "A"),
        (bth.fecn, "FECN"),
        (bth.becn, "BECN"),
    ];
    let set: Vec<_> = flags.into_iter().filter_map(|(set, name)| set.then_some(name)).collect();
    if !set.is_empty() {
        write!(f, " [{}]", set.join(","))?;
    }
    if bth.pkey != Pkey::DEFAULT {
        write!(f, " pkey 0x{:04x}", bth.pkey.0)?;
    }
    if bth.version != 0 {
        write!(f, " tver {}", bth.version)?;
    }
    if bth.pad != 0 {
        write!(f, " pad {}", bth.pad)?;
    }
    Ok(())
}

fn header(packet: &Packet<'_>, ext: Ext) -> Option<String> {
    Some(match ext {
        Ext::Deth => {
            let deth = packet.deth()?;
            format!("deth(qkey 0x{:08x} from qp {})", deth.qkey, deth.src_qpn)
        }
        Ext::Reth => {
            let reth = packet.reth()?;
            format!("reth(va 0x{:x} rkey {} len {})", reth.va, reth.rkey, reth.len)
        }
        Ext::AtomicEth => {
            let atomic = packet.atomic_eth()?;
            format!(
                "atomic(va 0x{:x} rkey {} swap/add 0x{:x} compare 0x{:x})",
                atomic.va, atomic.rkey, atomic.swap_add, atomic.compare
            )
        }
        Ext::Aeth => aeth(packet.aeth()?),
        Ext::AtomicAckEth => format!("original(0x{:x})", packet.atomic_ack()?),
        Ext::ImmDt => format!("imm(0x{:08x})", u32::from_be_bytes(packet.immediate()?)),
        Ext::Ieth => format!("invalidate({})", packet.invalidate()?),
        Ext::Feth => {
            let feth = packet.feth()?;
            format!("flush(placement {}, level {})", feth.placement(), feth.level())
        }
    })
}

fn aeth(aeth: Aeth) -> String {
    let meaning = match aeth.syndrome.kind() {
        AckKind::Ack { credit: 0x1f } => "ACK".to_owned(),
        AckKind::Ack { credit } => format!("ACK credits {credit}"),
        AckKind::RnrNak { timer } => {
            let us = rnr_timer_us(timer);
            format!("RNR NAK timer {timer} = {}.{:02} ms", us / 1000, us % 1000 / 10)
        }
        AckKind::Nak(code) => format!("NAK {}", nak(code)),
        AckKind::Reserved => format!("reserved syndrome 0x{:02x}", aeth.syndrome.0),
    };
    format!("aeth({meaning} msn {})", aeth.msn)
}

fn nak(code: NakCode) -> &'static str {
    match code {
        NakCode::PsnSequenceError => "PSN sequence error",
        NakCode::InvalidRequest => "invalid request",
        NakCode::RemoteAccessError => "remote access error",
        NakCode::RemoteOperationalError => "remote operational error",
        NakCode::InvalidRdRequest => "invalid RD request",
    }
}
