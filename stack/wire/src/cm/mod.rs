//! The messages of the communication manager.
//!
//! Offsets and widths are those of Linux' `include/rdma/ibta_vol1_c12.h`, which names the tables of
//! IBTA volume 1, chapter 12. Attribute ids, rejection reasons and lengths of private data are
//! those of `include/rdma/ib_cm.h`. All were compared with captures of rxe. Offsets in the comments
//! count from the end of the MAD header. Fields smaller than a byte are listed most significant bit
//! first. Reserved bits are written as 0 and not read.
//!
//! Each message is a value that borrows its private data. Unused bytes of private data are 0, and a
//! receiver cannot tell the used length: parsed private data always has its full length.

mod answer;
mod connect;
mod field;
mod ip;
mod message;
mod sidr;

pub use answer::{Apr, Drep, Dreq, Lap, Mra, Rej, RejReason, Rtu, Subject};
pub use connect::{Announced, CmPath, Rep, Req, Transport};
pub use field::{CommId, code_to_ns};
pub use ip::{Gid, IpHeader, IpHeaderError, PortSpace, ServiceId};
pub use message::CmMessage;
pub use sidr::{SidrRep, SidrReq, SidrStatus};
