//! One line per packet.

use std::fmt;
use std::net::IpAddr;

use rocinante_wire::ext::rnr_timer_us;
use rocinante_wire::types::{Key, Pkey, Qpn};
use rocinante_wire::{
    AckKind, Aeth, AtomicEth, Bth, Deth, Ext, Feth, NakCode, Opcode, OpcodeInfo, Packet, Reth,
    Service, WireError, bth,
};
use serde_json::{Map, Value, json};

use super::check::{Piece, Verdict};
use super::manage::Managed;
use crate::output::present;

/// A packet, as far as it can be read.
#[derive(Debug)]
pub struct Decoded<'a> {
    pub(super) bth: Option<Bth>,
    pub(super) info: Option<&'static OpcodeInfo>,
    /// The extension headers that are completely in the file.
    pub(super) headers: Headers,
    pub(super) payload_len: Option<usize>,
    /// The message of the connection manager in it.
    pub(super) managed: Option<Managed>,
    /// Whether the capture has had it before.
    pub(super) again: bool,
    error: Option<WireError>,
    piece: Piece<'a>,
}

/// Extension headers.
#[derive(Debug, Default)]
pub(super) struct Headers {
    pub(super) deth: Option<Deth>,
    reth: Option<Reth>,
    atomic: Option<AtomicEth>,
    pub(super) aeth: Option<Aeth>,
    original: Option<u64>,
    imm: Option<u32>,
    invalidate: Option<Key>,
    flush: Option<Feth>,
}

impl<'a> Decoded<'a> {
    /// Reads the captured bytes. Bytes that the capture cut off count as zeros and are not shown.
    #[must_use]
    pub fn new(piece: Piece<'a>) -> Self {
        let bth = piece.captured.first_chunk::<{ bth::LEN }>().map(Bth::read);
        let mut decoded = Self {
            info: bth.and_then(|bth| bth.opcode.info()),
            bth,
            headers: Headers::default(),
            payload_len: None,
            managed: None,
            again: false,
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
                for ext in packet.info.extensions {
                    let end = packet.info.offset(*ext).map(|at| at + ext.size());
                    if end.is_some_and(|end| end <= piece.captured.len()) {
                        decoded.headers.read(&packet, *ext);
                    }
                }
                decoded.payload_len = Some(packet.payload().len());
                let to_gsi = packet.info.service == Service::Ud
                    && bth.is_some_and(|bth| bth.dest_qpn == Qpn::GSI);
                if to_gsi && piece.captured.len() == piece.len {
                    decoded.managed = Managed::parse(packet.payload());
                }
            }
            Err(error) => decoded.error = Some(error),
        }
        decoded
    }

    /// The payload's length, or that of all bytes if it is not known.
    pub(super) fn len(&self) -> usize {
        self.payload_len.unwrap_or(self.piece.len)
    }

    /// Whether the ICRC is wrong, so that its receiver drops it.
    pub(super) fn is_bad(&self) -> bool {
        matches!(self.piece.verdict, Verdict::Bad { .. })
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
        write!(f, "{}", self.headers)?;
        match (self.payload_len, self.error) {
            (Some(len), _) => write!(f, " len {len}")?,
            // The opcode has been printed.
            (None, Some(WireError::UnknownOpcode(_))) => write!(f, " bytes {}", self.piece.len)?,
            (None, Some(error)) => write!(f, " bytes {} ({error})", self.piece.len)?,
            (None, None) => write!(f, " bytes {}", self.piece.len)?,
        }
        if let Some(managed) = &self.managed {
            write!(f, " cm({managed})")?;
        }
        if self.again {
            f.write_str(" again")?;
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

/// Prints the flags as ` [SE,A]`, if any is set, and then each field with an unusual value. It
/// leaves out MigReq, of path migration: some implementations set it always, some never, and no
/// known one reads it.
fn write_flags(f: &mut fmt::Formatter<'_>, bth: &Bth) -> fmt::Result {
    let flags = [(bth.solicited, "SE"), (bth.ack_req, "A"), (bth.fecn, "FECN"), (bth.becn, "BECN")];
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

impl Headers {
    fn read(&mut self, packet: &Packet<'_>, ext: Ext) {
        match ext {
            Ext::Deth => self.deth = packet.deth(),
            Ext::Reth => self.reth = packet.reth(),
            Ext::AtomicEth => self.atomic = packet.atomic_eth(),
            Ext::Aeth => self.aeth = packet.aeth(),
            Ext::AtomicAckEth => self.original = packet.atomic_ack(),
            Ext::ImmDt => self.imm = packet.immediate().map(u32::from_be_bytes),
            Ext::Ieth => self.invalidate = packet.invalidate(),
            Ext::Feth => self.flush = packet.feth(),
        }
    }
}

impl fmt::Display for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(deth) = &self.deth {
            write!(f, " deth(qkey 0x{:08x} from qp {})", deth.qkey, deth.src_qpn)?;
        }
        if let Some(flush) = &self.flush {
            write!(f, " flush(placement {}, level {})", flush.placement(), flush.level())?;
        }
        if let Some(Reth { va, rkey, len }) = &self.reth {
            write!(f, " reth(va 0x{va:x} rkey {rkey} len {len})")?;
        }
        if let Some(AtomicEth { va, rkey, swap_add, compare }) = &self.atomic {
            write!(
                f,
                " atomic(va 0x{va:x} rkey {rkey} swap/add 0x{swap_add:x} compare 0x{compare:x})"
            )?;
        }
        if let Some(header) = &self.aeth {
            write!(f, " {}", aeth(*header))?;
        }
        if let Some(original) = self.original {
            write!(f, " original(0x{original:x})")?;
        }
        if let Some(imm) = self.imm {
            write!(f, " imm(0x{imm:08x})")?;
        }
        match self.invalidate {
            Some(key) => write!(f, " invalidate({key})"),
            None => Ok(()),
        }
    }
}

/// The contents of a packet's line besides the packet.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Number of the frame, from 1.
    pub frame: u64,
    /// Nanoseconds since 1970.
    pub time_ns: Option<i128>,
    /// Nanoseconds since the first frame.
    pub since_start_ns: Option<i128>,
    /// Source and destination.
    pub ends: (IpAddr, IpAddr),
    /// UDP source port.
    pub src_port: u16,
    /// The queue pair that sent it, if that is known.
    pub src_qpn: Option<u32>,
}

impl Decoded<'_> {
    /// The packet as an object of JSON.
    #[must_use]
    pub fn json(&self, place: &Place) -> Value {
        let hex = |value: u64| json!(format!("0x{value:x}"));
        let mut to = Map::new();
        let mut put = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                to.insert(name.to_owned(), value);
            }
        };
        put("frame", Some(json!(place.frame)));
        put("part", self.piece.index.map(|part| json!(part)));
        put("seconds", place.since_start_ns.map(|ns| json!(ns as f64 / 1e9)));
        put(
            "epoch",
            place.time_ns.map(|ns| {
                let sign = if ns < 0 { "-" } else { "" };
                let ns = ns.unsigned_abs();
                json!(format!("{sign}{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000))
            }),
        );
        let (src, dst) = place.ends;
        put("src", Some(json!(src)));
        put("dst", Some(json!(dst)));
        put("src_port", Some(json!(place.src_port)));
        let src_qpn = self.headers.deth.map(|deth| deth.src_qpn.value()).or(place.src_qpn);
        put("src_qpn", src_qpn.map(|qpn| json!(qpn)));
        put("opcode", Some(json!(self.opcode().map_or_else(|| NO_BTH.to_owned(), opcode_name))));
        if let Some(bth) = &self.bth {
            for (name, value) in [
                ("dest_qpn", json!(bth.dest_qpn.value())),
                ("psn", json!(bth.psn.value())),
                ("solicited", json!(bth.solicited)),
                ("mig_req", json!(bth.mig_req)),
                ("ack_req", json!(bth.ack_req)),
                ("fecn", json!(bth.fecn)),
                ("becn", json!(bth.becn)),
                ("pkey", json!(bth.pkey.0)),
                ("tver", json!(bth.version)),
                ("pad", json!(bth.pad)),
            ] {
                put(name, Some(value));
            }
        }
        let headers = &self.headers;
        put("deth", headers.deth.map(|it| json!({"qkey": it.qkey, "src_qpn": it.src_qpn.value()})));
        put(
            "reth",
            headers.reth.map(|it| json!({"va": hex(it.va), "rkey": it.rkey.0, "len": it.len})),
        );
        put("atomic", headers.atomic.map(|it| json!({
            "va": hex(it.va), "rkey": it.rkey.0, "swap_add": hex(it.swap_add), "compare": hex(it.compare),
        })));
        put("aeth", headers.aeth.map(aeth_json));
        put("original", headers.original.map(hex));
        put("imm", headers.imm.map(|imm| json!(imm)));
        put("invalidate_rkey", headers.invalidate.map(|key| json!(key.0)));
        put(
            "flush",
            headers.flush.map(|it| json!({"placement": it.placement(), "level": it.level()})),
        );
        put("payload_bytes", self.payload_len.map(|len| json!(len)));
        put("bytes", Some(json!(self.piece.len)));
        put("problem", self.error.map(|error| json!(error.to_string())));
        put("cm", self.managed.as_ref().map(|managed| present(json!(managed))));
        put("again", Some(json!(self.again)));
        let (verdict, why) = match self.piece.verdict {
            Verdict::Ok => ("ok", None),
            Verdict::Bad { computed, found } => {
                put("icrc_computed", Some(json!(computed)));
                put("icrc_found", Some(json!(found)));
                ("bad", None)
            }
            Verdict::Unknown(why) => ("unknown", Some(json!(why.to_string()))),
        };
        put("icrc", Some(json!(verdict)));
        put("icrc_why", why);
        Value::Object(to)
    }
}

fn aeth_json(aeth: Aeth) -> Value {
    let mut object = json!({"syndrome": aeth.syndrome.0, "msn": aeth.msn});
    object["kind"] = match aeth.syndrome.kind() {
        AckKind::Ack { credit } => {
            object["credit_code"] = json!(credit);
            json!("ack")
        }
        AckKind::RnrNak { timer } => {
            object["timer_us"] = json!(rnr_timer_us(timer));
            json!("rnr_nak")
        }
        AckKind::Nak(code) => {
            object["nak"] = json!(nak(code));
            json!("nak")
        }
        AckKind::Reserved => json!("reserved"),
    };
    object
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
