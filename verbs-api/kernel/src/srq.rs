//! Shared receive queues of the kernel's devices.

use std::io;
use std::sync::Arc;

use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::qp::PostListError;
use rocinante_stack::verbs::RecvWr;
use rocinante_stack::{SrqAttr, SrqChange};
use rustix::io::Errno;

use super::ffi::{self, abi};
use super::{Pd, error};

/// A shared receive queue; dropping it destroys it.
#[derive(Debug)]
pub struct Srq {
    raw: Arc<ffi::Srq>,
}

impl Srq {
    pub fn create(pd: &Pd, max_wr: u32, max_sge: u32) -> Result<Self, VerbsError> {
        let raw = ffi::Srq::create(pd.raw()?, abi::SrqAttr { max_wr, max_sge, srq_limit: 0 });
        let raw = raw.map_err(|error| cannot_create(max_wr, max_sge, error))?;
        Ok(Self { raw: Arc::new(raw) })
    }

    pub(super) fn raw(&self) -> &Arc<ffi::Srq> {
        &self.raw
    }

    pub fn number(&self) -> u32 {
        self.raw.handle()
    }

    #[inline]
    pub fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        self.raw.post_recv(list)
    }

    pub fn modify(&self, change: &SrqChange) -> Result<(), VerbsError> {
        let SrqChange { max_wr, srq_limit } = *change;
        let mask = [(max_wr, abi::SRQ_MAX_WR), (srq_limit, abi::SRQ_LIMIT)];
        let mask = mask.iter().filter(|(value, _)| value.is_some()).map(|(_, bit)| bit).sum();
        let mut attr = abi::SrqAttr {
            max_wr: max_wr.unwrap_or(0),
            max_sge: 0,
            srq_limit: srq_limit.unwrap_or(0),
        };
        self.raw.modify(&mut attr, mask).map_err(|error| {
            let what = format!("ibv_modify_srq (max_wr {max_wr:?}, srq_limit {srq_limit:?})");
            if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) {
                let why = "the device refuses it: the limit must not exceed the depth, nor the depth be less than what is posted; \
                           not every device can change the depth";
                VerbsError::Invalid(format!("{what}: {why}"))
            } else {
                error::failed(&what, error)
            }
        })
    }

    pub fn query(&self) -> Result<SrqAttr, VerbsError> {
        let attr = self.raw.query().map_err(|error| error::failed("ibv_query_srq", error))?;
        let abi::SrqAttr { max_wr, max_sge, srq_limit } = attr;
        Ok(SrqAttr { max_wr, max_sge, srq_limit })
    }
}

fn cannot_create(max_wr: u32, max_sge: u32, error: io::Error) -> VerbsError {
    match error.raw_os_error() {
        Some(errno) if errno == Errno::NOMEM.raw_os_error() => {
            error::locked("ibv_create_srq", None, error)
        }
        _ => error::failed(&format!("ibv_create_srq ({max_wr} of {max_sge} elements)"), error),
    }
}
