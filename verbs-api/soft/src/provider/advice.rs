//! Pages of regions that programs ask for in advance.

use super::memory;
use crate::model::error::VerbsError;

/// The wish of `Mr::advise` (`enum ib_uverbs_advise_mr_advice`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// The pages will be read (`IBV_ADVISE_MR_ADVICE_PREFETCH`).
    Prefetch,
    /// The pages will be written, too (`IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE`).
    PrefetchWrite,
    /// No page is brought in (`IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT`). The device in software has
    /// no tables of pages to fill, so this only checks that the memory is there.
    PrefetchNoFault,
}

impl Advice {
    /// Brings the pages of memory in that a region has.
    #[doc(hidden)]
    pub fn follow(self, address: u64, len: usize) -> Result<(), VerbsError> {
        let writable = self == Self::PrefetchWrite;
        let there = match self {
            Self::Prefetch | Self::PrefetchWrite => {
                memory::populate(address, len as u64, writable).is_ok()
            }
            Self::PrefetchNoFault => memory::is_mapped(address, len as u64),
        };
        if there { Ok(()) } else { Err(VerbsError::Fault { address, len, writable }) }
    }
}
