//! Address handles: where datagrams go.

use crate::mem::PdId;
use crate::peer::PeerId;
use crate::verbs::AhId;

/// An address handle: the path of a datagram and the credit of its receiver.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Handle {
    pub(crate) pd: PdId,
    /// The caller's name for the path.
    pub(crate) path: u32,
    pub(crate) receiver: PeerId,
}

/// The address handles of an engine. An id is an index; the bits above it count how often the index
/// was given out. A stale id therefore names another handle only after its index was given out
/// 4,096 more times.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    slots: Vec<(u32, Option<Handle>)>,
    free: Vec<u32>,
}

const INDEX_BITS: u32 = 20;

impl Handles {
    /// `None` if there are a million handles.
    pub(crate) fn insert(&mut self, handle: Handle) -> Option<AhId> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                let index = u32::try_from(self.slots.len()).ok()?;
                if index >> INDEX_BITS != 0 {
                    return None;
                }
                self.slots.push((0, None));
                index
            }
        };
        let (generation, slot) = &mut self.slots[index as usize];
        *slot = Some(handle);
        Some(AhId(*generation << INDEX_BITS | index))
    }

    #[inline]
    pub(crate) fn get(&self, id: AhId) -> Option<&Handle> {
        let (generation, handle) = self.slots.get(index(id))?;
        handle.as_ref().filter(|_| *generation == id.0 >> INDEX_BITS)
    }

    pub(crate) fn count(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(crate) fn remove(&mut self, id: AhId) -> Option<Handle> {
        self.get(id)?;
        let (generation, handle) = &mut self.slots[index(id)];
        *generation = (*generation + 1) & (u32::MAX >> INDEX_BITS);
        self.free.push(id.0 & ((1 << INDEX_BITS) - 1));
        handle.take()
    }
}

const fn index(id: AhId) -> usize {
    (id.0 & ((1 << INDEX_BITS) - 1)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_of_a_handle_that_is_gone_names_no_other() {
        let handle = |path| Handle { pd: PdId(1), path, receiver: PeerId::OWN };
        let mut handles = Handles::default();
        let [a, b] = [1, 2].map(|path| handles.insert(handle(path)).unwrap());
        assert_eq!(handles.remove(a).map(|handle| handle.path), Some(1));
        let c = handles.insert(handle(3)).unwrap();
        assert_eq!([a, b, c].map(|id| handles.get(id).map(|h| h.path)), [None, Some(2), Some(3)]);
        assert!(handles.remove(a).is_none());
        assert!(handles.get(AhId(u32::MAX)).is_none());
        // The stale id stays refused however often its index is given out, until all ids of the
        // index are used up.
        handles.remove(c);
        for _ in 2..4096 {
            let last = handles.insert(handle(4)).unwrap();
            assert!(
                index(last) == index(a) && handles.get(a).is_none() && handles.get(c).is_none()
            );
            handles.remove(last);
        }
    }
}
