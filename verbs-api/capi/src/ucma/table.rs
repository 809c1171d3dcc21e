//! The ids of a process, by their numbers.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use rocinante_stack::types::Psn;
use rocinante_stack::verbs::QpType;

use super::Outcome;
use super::event::{File, Group};
use super::id::{Facts, Held, Id};
use crate::plain::{PortSpace, random};

/// Most ids, which librdmacm's own table has (`IDX_MAX_INDEX` of `indexer.h`), and most groups.
const MOST: u32 = 0xffff;

/// Ids and multicast groups.
#[derive(Default)]
pub(super) struct Table {
    ids: Mutex<Numbered<Id>>,
    groups: Mutex<Numbered<Group>>,
}

struct Numbered<T> {
    last: u32,
    all: HashMap<u32, Arc<T>>,
}

impl<T> Default for Numbered<T> {
    fn default() -> Self {
        Self { last: 0, all: HashMap::new() }
    }
}

impl<T> Numbered<T> {
    /// Makes one with a number that was not in use lately.
    fn make(&mut self, make: impl FnOnce(u32) -> T) -> Outcome<Arc<T>> {
        if self.all.len() >= MOST as usize {
            return Err(libc::ENOMEM);
        }
        while self.last == 0 || self.all.contains_key(&self.last) {
            self.last = (self.last + 1) % (MOST + 1);
        }
        let number = self.last;
        self.last = (number + 1) % (MOST + 1);
        let it = Arc::new(make(number));
        self.all.insert(number, it.clone());
        Ok(it)
    }
}

impl Table {
    pub(super) fn make(
        &self,
        of: (PortSpace, QpType),
        (uid, file): (u64, Arc<File>),
        fill: impl FnOnce(&mut Held, &mut Facts),
    ) -> Outcome<Arc<Id>> {
        let psn = Psn::new(random().map_err(|error| error.errno())?);
        self.ids.lock().make(|number| {
            let mut id = Id::new(number, of, (uid, file), psn);
            fill(id.held.get_mut(), id.facts.get_mut());
            id
        })
    }

    /// # Errors
    /// As the kernel: `ENOENT` if there is none, `EINVAL` if it is another file's.
    pub(super) fn find(&self, number: u32, file: &Arc<File>) -> Outcome<Arc<Id>> {
        let id = self.ids.lock().all.get(&number).cloned().ok_or(libc::ENOENT)?;
        let facts = id.facts.lock();
        let (is_told, is_its) = (facts.is_told, Arc::ptr_eq(&facts.file, file));
        drop(facts);
        match (is_told, is_its) {
            (false, _) => Err(libc::ENOENT),
            (true, false) => Err(libc::EINVAL),
            (true, true) => Ok(id),
        }
    }

    pub(super) fn remove(&self, number: u32) {
        self.ids.lock().all.remove(&number);
    }

    /// The ids of a file; of all files for `None`.
    pub(super) fn ids_of(&self, file: Option<&Arc<File>>) -> Vec<Arc<Id>> {
        let all: Vec<_> = self.ids.lock().all.values().cloned().collect();
        let is_its = |id: &Arc<Id>| file.is_none_or(|it| Arc::ptr_eq(&id.facts.lock().file, it));
        all.into_iter().filter(is_its).collect()
    }

    /// The numbers of ids and groups.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.ids.lock().all.len(), self.groups.lock().all.len())
    }

    pub(super) fn make_group(&self, make: impl FnOnce(u32) -> Group) -> Outcome<Arc<Group>> {
        self.groups.lock().make(make)
    }

    /// # Errors
    /// `ENOENT` if there is none.
    pub(super) fn group(&self, number: u32) -> Outcome<Arc<Group>> {
        self.groups.lock().all.get(&number).cloned().ok_or(libc::ENOENT)
    }

    pub(super) fn remove_group(&self, number: u32) {
        self.groups.lock().all.remove(&number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers begin again after 65,535 of them.
    #[test]
    fn no_id_gets_the_number_of_another_that_is_there() {
        let mut numbered = Numbered::default();
        let old = [(); 3].map(|()| *numbered.make(|number| number).unwrap());
        assert_eq!(old, [1, 2, 3]);
        let mut last = old[2];
        for _ in 0..2 * MOST {
            let fresh = *numbered.make(|number| number).unwrap();
            assert!(fresh != 0 && fresh != last && !old.contains(&fresh), "{fresh}");
            numbered.all.remove(&fresh);
            last = fresh;
        }
        while numbered.make(|number| number).is_ok() {}
        assert_eq!(numbered.all.len(), MOST as usize);
    }
}
