//! Ids that no outsider can guess: a counter through SipHash-2-4 (Aumasson and
//! Bernstein, 2012), with a key that the caller drew.

/// A sequence of numbers that looks random without the key.
#[derive(Debug)]
pub(crate) struct Ids {
    key: [u64; 2],
    next: u64,
    slot: Option<u8>,
}

/// The bits of a number that name the device's slot, where several devices share an address.
const SLOT_SHIFT: u32 = 24;

/// The slot of the device that drew an id, or a number whose lower half is one.
pub(crate) const fn slot_of(id: u32) -> u8 {
    (id >> SLOT_SHIFT) as u8
}

impl Ids {
    /// With a slot, all numbers say so.
    pub(crate) const fn new(key: [u64; 2], slot: Option<u8>) -> Self {
        Self { key, next: 0, slot }
    }

    /// The next number.
    pub(crate) fn draw(&mut self) -> u64 {
        self.next += 1;
        let drawn = siphash(self.key, self.next);
        match self.slot {
            None => drawn,
            Some(slot) => drawn & !(0xff << SLOT_SHIFT) | u64::from(slot) << SLOT_SHIFT,
        }
    }
}

/// SipHash-2-4 of the eight bytes of `word`, little-endian.
fn siphash(key: [u64; 2], word: u64) -> u64 {
    let mut v = [
        key[0] ^ 0x736f_6d65_7073_6575,
        key[1] ^ 0x646f_7261_6e64_6f6d,
        key[0] ^ 0x6c79_6765_6e65_7261,
        key[1] ^ 0x7465_6462_7974_6573,
    ];
    for block in [word, 8 << 56] {
        v[3] ^= block;
        round(&mut v);
        round(&mut v);
        v[0] ^= block;
    }
    v[2] ^= 0xff;
    for _ in 0..4 {
        round(&mut v);
    }
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

fn round(v: &mut [u64; 4]) {
    v[0] = v[0].wrapping_add(v[1]);
    v[2] = v[2].wrapping_add(v[3]);
    v[1] = v[1].rotate_left(13) ^ v[0];
    v[3] = v[3].rotate_left(16) ^ v[2];
    v[0] = v[0].rotate_left(32);
    v[2] = v[2].wrapping_add(v[1]);
    v[0] = v[0].wrapping_add(v[3]);
    v[1] = v[1].rotate_left(17) ^ v[2];
    v[3] = v[3].rotate_left(21) ^ v[0];
    v[2] = v[2].rotate_left(32);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_each_slot_the_ids_say_so_and_are_random_besides() {
        let drawn = |slot| {
            let mut ids = Ids::new([1, 2], slot);
            [(); 100].map(|()| ids.draw())
        };
        let free = drawn(None);
        for slot in [0, 1, 0x80, 0xff] {
            let own = drawn(Some(slot));
            let slots = own.map(|id| slot_of(id as u32));
            assert_eq!(slots, [slot; 100]);
            let masked = |ids: [u64; 100]| ids.map(|id| id & !0xff00_0000);
            assert_eq!(masked(own), masked(free));
        }
    }

    /// The reference implementation's vector for eight bytes: key 00 01 … 0f, message 00 01 … 07.
    #[test]
    fn it_is_siphash() {
        let key = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
        assert_eq!(siphash(key, 0x0706_0504_0302_0100), 0x93f5_f579_9a93_2462);
    }
}
