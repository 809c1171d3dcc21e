//! Buffers of one size in one region.

use std::sync::Arc;

use parking_lot::Mutex;
use rocinante_soft::model::error::VerbsError;
use rocinante_stack::mem::Access;

use super::{Mr, MrSlice};
use crate::context::Pd;

/// Buffers of one size in one registered region. Cheap to clone.
///
/// A request in flight needs its buffer until its completion, which names the request by a number.
/// So a program gives a buffer away as that number and takes it back with the completion:
///
/// ```
/// use std::net::IpAddr;
/// use std::time::Duration;
/// use rocinante::{Access, BufferPool, ConnectOptions, Context, RecvWr, SendWr, VerbsError};
///
/// fn main() -> Result<(), VerbsError> {
///     let [here, there] = [1, 2].map(|host| IpAddr::from([127, 0, 0, host]));
/// #   let (here, there) = rocinante::doc::addresses();
///     let (a, b) = (Context::open(here)?, Context::open(there)?);
///     let (pd_a, pd_b) = (a.alloc_pd(), b.alloc_pd());
///     let (cq_a, cq_b) = (a.create_cq(16)?, b.create_cq(16)?);
///     let (qp_a, qp_b) = (pd_a.qp(&cq_a, &cq_a).build()?, pd_b.qp(&cq_b, &cq_b).build()?);
///     let (to_b, to_a) = (qp_b.endpoint(), qp_a.endpoint());
///     let options = ConnectOptions::default();
///     let (qp_a, qp_b) = (qp_a.connect(&to_b, &options)?, qp_b.connect(&to_a, &options)?);
///
///     let pool = BufferPool::new(&pd_b, 16, 4096, Access::LOCAL_WRITE)?;
///     while let Some(buffer) = pool.take() {
///         let sge = buffer.slice().sge();
///         qp_b.post_recv(&[RecvWr::new(buffer.give_away(), &[sge])])?;
///     }
///     qp_a.post(SendWr::send(b"hello"))?;
///
///     let wc = cq_b.wait_one(Duration::from_secs(5))?;
///     let buffer = pool.take_back(wc.wr_id).expect("given away");
///     assert_eq!(buffer.slice().slice(0, wc.byte_len as usize).to_vec(), b"hello");
///     Ok(())
/// }
/// ```
#[derive(Debug, Clone)]
pub struct BufferPool {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    mr: Mr,
    size: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    free: Vec<usize>,
    given_away: Vec<bool>,
}

/// A buffer of a pool. Dropping it makes it free.
#[derive(Debug)]
pub struct PoolBuffer {
    inner: Arc<Inner>,
    index: usize,
    is_given_away: bool,
}

impl BufferPool {
    /// Allocates and registers `count` buffers of `size` zero bytes. Each begins at a multiple of
    /// 64, a cache line.
    ///
    /// # Errors
    /// As [`Pd::allocate`].
    pub fn new(pd: &Pd, count: usize, size: usize, access: Access) -> Result<Self, VerbsError> {
        let stride = size.checked_next_multiple_of(64);
        let Some(len) = stride.and_then(|stride| stride.checked_mul(count)) else {
            let why = format!("{count} buffers of {size} bytes are more than memory has");
            return Err(VerbsError::Invalid(why));
        };
        let mr = pd.allocate(len, access)?;
        let state = State { free: (0..count).rev().collect(), given_away: vec![false; count] };
        Ok(Self { inner: Arc::new(Inner { mr, size, state: Mutex::new(state) }) })
    }

    /// A free buffer, with the bytes that its last user left; `None` if all are taken.
    #[must_use]
    pub fn take(&self) -> Option<PoolBuffer> {
        let index = self.inner.state.lock().free.pop()?;
        Some(self.buffer(index))
    }

    /// The buffer that [`PoolBuffer::give_away`] named by this number; `None` if there is none.
    #[must_use]
    pub fn take_back(&self, number: u64) -> Option<PoolBuffer> {
        let index = usize::try_from(number).ok()?;
        let given = std::mem::take(self.inner.state.lock().given_away.get_mut(index)?);
        given.then(|| self.buffer(index))
    }

    fn buffer(&self, index: usize) -> PoolBuffer {
        PoolBuffer { inner: self.inner.clone(), index, is_given_away: false }
    }

    /// Number of free buffers.
    #[must_use]
    pub fn free(&self) -> usize {
        self.inner.state.lock().free.len()
    }

    /// The region of all buffers.
    #[must_use]
    pub fn mr(&self) -> &Mr {
        &self.inner.mr
    }
}

impl PoolBuffer {
    /// Its memory.
    #[must_use]
    pub fn slice(&self) -> MrSlice<'_> {
        let Inner { mr, size, .. } = &*self.inner;
        mr.slice(self.index * size.next_multiple_of(64), *size)
    }

    /// Gives it to a work request, whose number this is, until [`BufferPool::take_back`].
    #[must_use]
    pub fn give_away(mut self) -> u64 {
        self.is_given_away = true;
        self.inner.state.lock().given_away[self.index] = true;
        self.index as u64
    }
}

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        // Once it is given away, it may be another thread's.
        if !self.is_given_away {
            self.inner.state.lock().free.push(self.index);
        }
    }
}
