//! Operations that own their memory until they are complete, for asynchronous programs.
//!
//! ```
//! use std::net::IpAddr;
//! use rocinante::asynchronous::AsyncQp;
//! use rocinante::{Access, ConnectOptions, Context, VerbsError};
//!
//! #[tokio::main(flavor = "current_thread")]
//! async fn main() -> Result<(), VerbsError> {
//!     let [here, there] = [1, 2].map(|host| IpAddr::from([127, 0, 0, host]));
//! #   let (here, there) = rocinante::doc::addresses();
//!     let (a, b) = (Context::open(here)?, Context::open(there)?);
//!     let (pd_a, pd_b) = (a.alloc_pd(), b.alloc_pd());
//!     let (cq_a, cq_b) = (a.create_cq(16)?, b.create_cq(16)?);
//!     let qp_a = AsyncQp::new(pd_a.qp(&cq_a, &cq_a).build()?)?;
//!     let qp_b = AsyncQp::new(pd_b.qp(&cq_b, &cq_b).build()?)?;
//!     let (to_b, to_a) = (qp_b.endpoint(), qp_a.endpoint());
//!     let qp_a = qp_a.connect_to(&to_b, &ConnectOptions::default())?;
//!     let qp_b = qp_b.connect_to(&to_a, &ConnectOptions::default())?;
//!
//!     let receiving = qp_b.recv(pd_b.allocate(64, Access::LOCAL_WRITE)?);
//!     let message = pd_a.allocate(5, Access::NONE)?;
//!     message.write(0, b"hello");
//!     let (sent, message) = qp_a.send(message).await;
//!     sent?;
//!     let (received, buffer) = receiving.await;
//!     assert_eq!(buffer.to_vec(0, received?.byte_len as usize), message.to_vec(0, 5));
//!     Ok(())
//! }
//! ```
//!
//! The [chapter](crate::guide::asynchronous) explains it, and all else that a task can wait for.
//! The futures run on any runtime.

mod pending_ops;
mod qp;

pub use self::qp::{AsyncQp, Buffer, Carrier, Operation, Part};
