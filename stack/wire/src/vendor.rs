//! The class of Rocinante's own datagrams on QP1.
//!
//! They are Sends of a vendor's class (IBTA volume 1, 16.5 \[M\]: classes 0x30 to 0x4f, with an
//! organisation's id). A standard peer drops them without an answer: `ib_core` looks for an agent
//! of the class and the id, and answers only a Get or a Set that no agent takes
//! (`find_mad_agent` and `generate_unmatched_resp` of Linux, `drivers/infiniband/core/mad.c`); mlx5
//! hands such a class through to it (`mlx5_ib_process_mad`), rxe has no handler of its own.
//!
//! ```text
//!  0..24   header: class 0x36, class version 1, method 3 (Send)
//! 24..37   no segments (RMPP), reserved
//! 37..40   organisation: 52 6f 63, which is administered locally
//! 40..     of the attribute
//! ```

use super::mad::{MAD_HEADER_LEN, MAD_LEN, MadBytes, MadHeader};

/// The class: of a vendor, with an organisation's id.
const CLASS: u8 = 0x36;
const CLASS_VERSION: u8 = 1;
/// "Roc". Its second lowest bit marks an id that no registry gave out.
const ORGANISATION: [u8; 3] = [0x52, 0x6f, 0x63];

/// A datagram of the class and organisation, of any attribute.
pub(super) struct Frame<'a> {
    pub(super) tid: u64,
    pub(super) attribute: u16,
    pub(super) mad: &'a MadBytes,
}

impl<'a> Frame<'a> {
    /// `None` if it is of another class or organisation.
    pub(super) fn read(payload: &'a [u8]) -> Option<Self> {
        let mad: &MadBytes = payload.try_into().ok()?;
        let header = MadHeader::read(mad.first_chunk()?);
        let ours = header.base_version == 1
            && header.class == CLASS
            && header.class_version == CLASS_VERSION
            && header.method == MadHeader::METHOD_SEND
            && mad[37..40] == ORGANISATION;
        ours.then_some(Self { tid: header.tid, attribute: header.attribute, mad })
    }

    /// The datagram with nothing behind the organisation.
    pub(super) fn write(attribute: u16, tid: u64) -> MadBytes {
        let header = MadHeader {
            class: CLASS,
            class_version: CLASS_VERSION,
            ..MadHeader::cm(attribute, tid)
        };
        let mut mad = [0; MAD_LEN];
        mad[..MAD_HEADER_LEN].copy_from_slice(&header.bytes());
        mad[37..40].copy_from_slice(&ORGANISATION);
        mad
    }
}
