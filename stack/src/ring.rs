//! A queue in a ring whose length is a power of two, so that a mask turns a count into a place.
//!
//! A push or a pop takes fewer instructions than that of a `VecDeque`, and the queue itself 24
//! bytes in the place of 32. In exchange the room for elements is rounded up to a power of two and
//! written when it is made, and elements are `Copy`.

/// A queue of elements.
#[derive(Debug, Default)]
pub(crate) struct Ring<T> {
    /// None, or a power of two.
    slots: Box<[T]>,
    /// The number of elements that were ever taken from the front, and of those that were ever
    /// pushed to the back, modulo 2^32.
    head: u32,
    tail: u32,
}

impl<T: Copy + Default> Ring<T> {
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.tail.wrapping_sub(self.head) as usize
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Elements for which there is memory.
    #[inline]
    pub(crate) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Makes room for `more` elements.
    pub(crate) fn reserve(&mut self, more: usize) {
        let len = self.len();
        if len + more > self.slots.len() {
            let mut slots = vec![T::default(); (len + more).next_power_of_two()];
            self.iter().zip(&mut slots).for_each(|(from, to)| *to = *from);
            (self.slots, self.head, self.tail) = (slots.into(), 0, len as u32);
        }
    }

    /// Makes room for one more.
    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        self.reserve(self.len().max(1));
    }

    #[inline]
    fn place(&self, count: u32) -> usize {
        count as usize & self.slots.len().wrapping_sub(1)
    }

    /// The element `at` places behind the first.
    #[inline]
    pub(crate) fn get(&self, at: usize) -> Option<&T> {
        let place = self.place(self.head.wrapping_add(at as u32));
        if at < self.len() { self.slots.get(place) } else { None }
    }

    #[inline]
    pub(crate) fn front(&self) -> Option<&T> {
        if self.is_empty() { None } else { self.slots.get(self.place(self.head)) }
    }

    #[inline]
    pub(crate) fn front_mut(&mut self) -> Option<&mut T> {
        let place = self.place(self.head);
        if self.is_empty() { None } else { self.slots.get_mut(place) }
    }

    #[inline]
    pub(crate) fn back(&self) -> Option<&T> {
        if self.is_empty() { None } else { self.slots.get(self.place(self.tail.wrapping_sub(1))) }
    }

    #[inline]
    pub(crate) fn back_mut(&mut self) -> Option<&mut T> {
        let place = self.place(self.tail.wrapping_sub(1));
        if self.is_empty() { None } else { self.slots.get_mut(place) }
    }

    #[inline(always)]
    pub(crate) fn push_back(&mut self, element: T) {
        if self.len() == self.slots.len() {
            self.grow();
        }
        let place = self.place(self.tail);
        self.slots[place] = element;
        self.tail = self.tail.wrapping_add(1);
    }

    #[inline]
    pub(crate) fn push_front(&mut self, element: T) {
        if self.len() == self.slots.len() {
            self.grow();
        }
        self.head = self.head.wrapping_sub(1);
        let place = self.place(self.head);
        self.slots[place] = element;
    }

    #[inline]
    pub(crate) fn pop_front(&mut self) -> Option<T> {
        let first = *self.front()?;
        self.head = self.head.wrapping_add(1);
        Some(first)
    }

    #[inline]
    pub(crate) fn pop_back(&mut self) -> Option<T> {
        let last = *self.back()?;
        self.tail = self.tail.wrapping_sub(1);
        Some(last)
    }

    #[inline]
    pub(crate) fn clear(&mut self) {
        self.head = self.tail;
    }

    /// All elements, the first one first.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &T> {
        (0..self.len()).filter_map(|at| self.get(at))
    }

    /// Elements at the front that `is_before` admits, which admits none behind another.
    pub(crate) fn partition_point(&self, is_before: impl Fn(&T) -> bool) -> usize {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low.midpoint(high);
            match self.get(middle).is_some_and(&is_before) {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        low
    }

    /// Drops those that `keeps` does not admit.
    pub(crate) fn retain(&mut self, keeps: impl Fn(&T) -> bool) {
        for _ in 0..self.len() {
            if let Some(element) = self.pop_front().filter(&keeps) {
                self.push_back(element);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// Whatever is done to both, also where the counts begin again.
    #[test]
    fn it_is_a_queue() {
        for start in [0, u32::MAX - 20] {
            let mut ring = Ring::default();
            // The counts begin at 0 whenever it grows, and it does not grow below this.
            ring.reserve(512);
            (ring.head, ring.tail) = (start, start);
            let (mut queue, mut state, mut wrapped) = (VecDeque::new(), 7u64, start == 0);
            for round in 0..if cfg!(miri) { 300 } else { 20_000u32 } {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                match state >> 60 {
                    0..=4 => {
                        ring.push_back(round);
                        queue.push_back(round);
                    }
                    5 => {
                        ring.push_front(round);
                        queue.push_front(round);
                    }
                    6..=8 => assert_eq!(ring.pop_front(), queue.pop_front()),
                    9..=11 => assert_eq!(ring.pop_back(), queue.pop_back()),
                    12 => {
                        ring.retain(|element| element % 7 != round % 7);
                        queue.retain(|element| element % 7 != round % 7);
                    }
                    13 => {
                        ring.front_mut().into_iter().for_each(|first| *first += 1);
                        queue.front_mut().into_iter().for_each(|first| *first += 1);
                    }
                    14 => {
                        ring.back_mut().into_iter().for_each(|last| *last += 2);
                        queue.back_mut().into_iter().for_each(|last| *last += 2);
                    }
                    _ if round % 8 == 0 => {
                        ring.clear();
                        queue.clear();
                    }
                    _ => {
                        ring.reserve(round as usize % 40);
                        assert!(ring.capacity() >= ring.len() + round as usize % 40);
                    }
                }
                assert!(ring.iter().eq(&queue) && ring.iter().rev().eq(queue.iter().rev()));
                assert_eq!((ring.front(), ring.back()), (queue.front(), queue.back()));
                assert_eq!((ring.len(), ring.is_empty()), (queue.len(), queue.is_empty()));
                let at = round as usize % 9;
                assert_eq!(ring.get(at), queue.get(at));
                wrapped |= ring.tail < ring.head;
            }
            assert!(wrapped && ring.capacity() == 512, "{wrapped} {}", ring.capacity());
        }
    }

    /// Also one that goes over the end of the ring, and whose counts begin again.
    #[test]
    fn it_grows_and_is_searched() {
        let mut ring = Ring::default();
        ring.reserve(4);
        (ring.head, ring.tail) = (u32::MAX - 1, u32::MAX - 1);
        (0..100u32).for_each(|element| {
            ring.push_back(element);
            if element % 3 == 0 {
                ring.pop_front();
            }
            assert!(ring.iter().copied().eq(element / 3 + 1..=element), "{element}");
        });
        let first = *ring.front().unwrap();
        for limit in 0..=101 {
            let before = limit.clamp(first, 100) - first;
            assert_eq!(ring.partition_point(|element| *element < limit), before as usize);
        }
    }
}
