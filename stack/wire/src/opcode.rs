//! The one table of opcodes. Lengths, offsets and roles are derived from it; all other code uses
//! it.
//!
//! Values: `include/rdma/ib_pack.h` of Linux; the order of extension headers: IBTA volume 1, 9.2
//! and the packet formats of the transport chapters \[M\], checked against captures of rxe.

use core::fmt;

/// Length of the base transport header, the first of every packet, in bytes.
pub const BTH_LEN: usize = 12;

/// The 8-bit BTH opcode: three bits of service, five of operation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Opcode(pub u8);

/// The transport service an opcode belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Congestion notification; it belongs to no service.
    Cnp,
}

/// The operation of an opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// SEND, in all its variants.
    Send,
    /// RDMA WRITE, in all its variants.
    Write,
    /// RDMA READ request.
    ReadRequest,
    /// RDMA READ response.
    ReadResponse,
    /// ACK, NAK or RNR NAK, as the AETH says.
    Acknowledge,
    /// Response to an atomic.
    AtomicAcknowledge,
    /// Compare and swap.
    CompareSwap,
    /// Fetch and add.
    FetchAdd,
    /// FLUSH (IBA 1.5).
    Flush,
    /// ATOMIC WRITE (IBA 1.5).
    AtomicWrite,
    /// Congestion notification packet.
    Notification,
}

impl Operation {
    const fn has_payload(self) -> bool {
        matches!(
            self,
            Self::Send | Self::Write | Self::ReadResponse | Self::AtomicWrite | Self::Notification
        )
    }

    const fn is_request(self) -> bool {
        !matches!(
            self,
            Self::ReadResponse | Self::Acknowledge | Self::AtomicAcknowledge | Self::Notification
        )
    }
}

/// The position of a packet in its message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// First of several.
    First,
    /// Neither first nor last.
    Middle,
    /// Last of several.
    Last,
    /// The whole message.
    Only,
}

impl Place {
    /// Whether a message begins with this packet.
    #[must_use]
    #[inline]
    pub const fn begins(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    /// Whether a message ends with this packet.
    #[must_use]
    #[inline]
    pub const fn ends(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }
}

/// An extension header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ext {
    /// Datagram extended transport header: Q_Key and source QPN.
    Deth,
    /// RDMA extended transport header: address, key, length.
    Reth,
    /// Atomic extended transport header: address, key, operands.
    AtomicEth,
    /// Acknowledge extended transport header: syndrome and MSN.
    Aeth,
    /// The original value that an atomic found.
    AtomicAckEth,
    /// Immediate data.
    ImmDt,
    /// The key to invalidate.
    Ieth,
    /// Flush extended transport header: placement type and selectivity.
    Feth,
}

impl Ext {
    /// The number of extension headers.
    const COUNT: usize = Self::Feth as usize + 1;

    /// Its length in bytes.
    #[inline]
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::Deth | Self::AtomicAckEth => 8,
            Self::Reth => 16,
            Self::AtomicEth => 28,
            Self::Aeth | Self::ImmDt | Self::Ieth | Self::Feth => 4,
        }
    }
}

/// All facts about an opcode.
#[derive(Debug, Clone, Copy)]
pub struct OpcodeInfo {
    /// The opcode.
    pub opcode: Opcode,
    /// Its name in `ib_pack.h`, without the prefix.
    pub name: &'static str,
    /// Its service.
    pub service: Service,
    /// Its operation.
    pub operation: Operation,
    /// Its position in the message.
    pub place: Place,
    /// Its extension headers, in the order in which they follow the BTH.
    pub extensions: &'static [Ext],
    /// BTH and extension headers together, in bytes.
    pub header_len: usize,
    /// Offset of each extension header; 0 if the opcode does not have it.
    offsets: [u8; Ext::COUNT],
    payload: bool,
    request: bool,
}

impl OpcodeInfo {
    /// Whether the opcode has that extension header.
    #[must_use]
    #[inline]
    pub const fn has(&self, ext: Ext) -> bool {
        self.offsets[ext as usize] != 0
    }

    /// Offset of an extension header from the start of the BTH.
    #[inline]
    #[must_use]
    pub const fn offset(&self, ext: Ext) -> Option<usize> {
        match self.offsets[ext as usize] {
            0 => None,
            at => Some(at as usize),
        }
    }

    /// Whether the packet may carry payload. FIRST and MIDDLE packets carry exactly one path MTU of
    /// it, LAST packets 1 byte to one path MTU, ONLY packets 0 bytes to one path MTU.
    #[must_use]
    #[inline]
    pub const fn has_payload(&self) -> bool {
        self.payload
    }

    /// Whether a requester sends it (as opposed to a responder).
    #[must_use]
    #[inline]
    pub const fn is_request(&self) -> bool {
        self.request
    }

    /// Whether its message consumes a receive request at the responder.
    #[must_use]
    #[inline]
    pub const fn consumes_receive(&self) -> bool {
        matches!(self.operation, Operation::Send)
            || (matches!(self.operation, Operation::Write) && self.has(Ext::ImmDt))
    }
}

impl Opcode {
    /// Its entry in the table, or `None` for a reserved opcode or another transport's.
    #[inline]
    #[must_use]
    pub const fn info(self) -> Option<&'static OpcodeInfo> {
        INDEX[self.0 as usize]
    }

    /// For a SEND or WRITE on a reliable connection: the same operation on an unreliable one.
    #[must_use]
    #[inline]
    pub const fn unreliable(self) -> Self {
        Self(self.0 & 0x1f | 0x20)
    }

    /// Every opcode of the table, ascending.
    pub fn all() -> impl Iterator<Item = &'static OpcodeInfo> {
        TABLE.iter()
    }
}

impl fmt::Debug for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.info() {
            Some(info) => write!(f, "{}", info.name),
            None => write!(f, "0x{:02x}", self.0),
        }
    }
}

/// Offsets of these extension headers, in their order behind the BTH.
const fn offsets(extensions: &[Ext]) -> [u8; Ext::COUNT] {
    let mut offsets = [0; Ext::COUNT];
    let (mut at, mut i) = (BTH_LEN, 0);
    while i < extensions.len() {
        let offset = at as u8;
        offsets[extensions[i] as usize] = offset;
        at += extensions[i].size();
        i += 1;
    }
    offsets
}

macro_rules! opcodes {
    ($( $value:literal $name:ident $service:ident $operation:ident $place:ident [$($ext:ident)*] )*) => {
        impl Opcode {
            $(
                #[doc = concat!(stringify!($name), ", ", stringify!($value), ".")]
                pub const $name: Self = Self($value);
            )*
        }

        static TABLE: &[OpcodeInfo] = &[$(
            OpcodeInfo {
                opcode: Opcode($value),
                name: stringify!($name),
                service: Service::$service,
                operation: Operation::$operation,
                place: Place::$place,
                extensions: &[$(Ext::$ext),*],
                header_len: BTH_LEN $(+ Ext::$ext.size())*,
                offsets: offsets(&[$(Ext::$ext),*]),
                payload: Operation::$operation.has_payload(),
                request: Operation::$operation.is_request(),
            },
        )*];

        static INDEX: [Option<&OpcodeInfo>; 256] = {
            let mut index = [None; 256];
            let mut at = 0;
            $(
                assert!(index[$value].is_none(), "an opcode stands twice in the table");
                index[$value] = Some(&TABLE[at]);
                at += 1;
            )*
            let _ = at;
            index
        };
    };
}

opcodes! {
    0x00 RC_SEND_FIRST                      Rc  Send              First  []
    0x01 RC_SEND_MIDDLE                     Rc  Send              Middle []
    0x02 RC_SEND_LAST                       Rc  Send              Last   []
    0x03 RC_SEND_LAST_WITH_IMMEDIATE        Rc  Send              Last   [ImmDt]
    0x04 RC_SEND_ONLY                       Rc  Send              Only   []
    0x05 RC_SEND_ONLY_WITH_IMMEDIATE        Rc  Send              Only   [ImmDt]
    0x06 RC_RDMA_WRITE_FIRST                Rc  Write             First  [Reth]
    0x07 RC_RDMA_WRITE_MIDDLE               Rc  Write             Middle []
    0x08 RC_RDMA_WRITE_LAST                 Rc  Write             Last   []
    0x09 RC_RDMA_WRITE_LAST_WITH_IMMEDIATE  Rc  Write             Last   [ImmDt]
    0x0a RC_RDMA_WRITE_ONLY                 Rc  Write             Only   [Reth]
    0x0b RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE  Rc  Write             Only   [Reth ImmDt]
    0x0c RC_RDMA_READ_REQUEST               Rc  ReadRequest       Only   [Reth]
    0x0d RC_RDMA_READ_RESPONSE_FIRST        Rc  ReadResponse      First  [Aeth]
    0x0e RC_RDMA_READ_RESPONSE_MIDDLE       Rc  ReadResponse      Middle []
    0x0f RC_RDMA_READ_RESPONSE_LAST         Rc  ReadResponse      Last   [Aeth]
    0x10 RC_RDMA_READ_RESPONSE_ONLY         Rc  ReadResponse      Only   [Aeth]
    0x11 RC_ACKNOWLEDGE                     Rc  Acknowledge       Only   [Aeth]
    0x12 RC_ATOMIC_ACKNOWLEDGE              Rc  AtomicAcknowledge Only   [Aeth AtomicAckEth]
    0x13 RC_COMPARE_SWAP                    Rc  CompareSwap       Only   [AtomicEth]
    0x14 RC_FETCH_ADD                       Rc  FetchAdd          Only   [AtomicEth]
    0x16 RC_SEND_LAST_WITH_INVALIDATE       Rc  Send              Last   [Ieth]
    0x17 RC_SEND_ONLY_WITH_INVALIDATE       Rc  Send              Only   [Ieth]
    0x1c RC_FLUSH                           Rc  Flush             Only   [Feth Reth]
    0x1d RC_ATOMIC_WRITE                    Rc  AtomicWrite       Only   [Reth]
    0x20 UC_SEND_FIRST                      Uc  Send              First  []
    0x21 UC_SEND_MIDDLE                     Uc  Send              Middle []
    0x22 UC_SEND_LAST                       Uc  Send              Last   []
    0x23 UC_SEND_LAST_WITH_IMMEDIATE        Uc  Send              Last   [ImmDt]
    0x24 UC_SEND_ONLY                       Uc  Send              Only   []
    0x25 UC_SEND_ONLY_WITH_IMMEDIATE        Uc  Send              Only   [ImmDt]
    0x26 UC_RDMA_WRITE_FIRST                Uc  Write             First  [Reth]
    0x27 UC_RDMA_WRITE_MIDDLE               Uc  Write             Middle []
    0x28 UC_RDMA_WRITE_LAST                 Uc  Write             Last   []
    0x29 UC_RDMA_WRITE_LAST_WITH_IMMEDIATE  Uc  Write             Last   [ImmDt]
    0x2a UC_RDMA_WRITE_ONLY                 Uc  Write             Only   [Reth]
    0x2b UC_RDMA_WRITE_ONLY_WITH_IMMEDIATE  Uc  Write             Only   [Reth ImmDt]
    0x64 UD_SEND_ONLY                       Ud  Send              Only   [Deth]
    0x65 UD_SEND_ONLY_WITH_IMMEDIATE        Ud  Send              Only   [Deth ImmDt]
    0x81 CNP                                Cnp Notification      Only   []
}
