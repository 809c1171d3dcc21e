//! How many datagrams take one place of our receive queue, where those that arrive as one
//! super-packet do: whether they do is the path's affair, so only what arrived lately says it.

/// What arrived lately; at first, and where nobody says how it arrived, each datagram by itself.
#[derive(Debug)]
pub(super) struct Arrivals {
    datagrams: u32,
    places: u32,
}

/// Places of what counts as lately: what is older counts half, and less.
const LATELY: u32 = 64;
/// The most datagrams of one place.
const DENSEST: u32 = 128;
/// What comes may take a third more places for each datagram than what came.
const MORE: (u32, u32) = (4, 3);

impl Default for Arrivals {
    fn default() -> Self {
        Self { datagrams: LATELY / 2, places: LATELY / 2 }
    }
}

impl Arrivals {
    /// So many datagrams took so many places.
    pub(super) fn add(&mut self, datagrams: u32, places: u32) {
        let datagrams = datagrams.clamp(places, places.saturating_mul(DENSEST));
        // Of many at once no more than what counts as lately, as dense as they were.
        let counted = places.min(LATELY);
        self.places += counted;
        self.datagrams += Self::scale(datagrams, counted, places.max(1));
        if self.places > LATELY {
            self.places = self.places.div_ceil(2);
            self.datagrams = (self.datagrams / 2).max(self.places);
        }
    }

    /// Places that so many datagrams will take, which are not expected one by one: what is left
    /// over of them takes one, too.
    pub(super) fn places_of(&self, datagrams: u32) -> u32 {
        let usual = Self::scale(datagrams, self.places * MORE.0, self.datagrams * MORE.1);
        usual.saturating_add(1).min(datagrams)
    }

    /// Datagrams that so many places will hold.
    pub(super) fn held_by(&self, places: u32) -> u32 {
        Self::scale(places, self.datagrams * MORE.1, self.places * MORE.0).max(places)
    }

    fn scale(value: u32, numerator: u32, denominator: u32) -> u32 {
        let scaled = u64::from(value) * u64::from(numerator) / u64::from(denominator);
        u32::try_from(scaled).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_speaks_of_comes_one_by_one() {
        let arrivals = Arrivals::default();
        for count in [1, 2, 15, 1000, u32::MAX] {
            assert_eq!((arrivals.places_of(count), arrivals.held_by(count)), (count, count));
        }
    }

    #[test]
    fn it_follows_what_arrives_and_stays_on_the_safe_side() {
        let mut arrivals = Arrivals::default();
        for _ in 0..200 {
            arrivals.add(12, 1);
        }
        assert_eq!([1, 12, 48].map(|count| arrivals.places_of(count)), [1, 2, 6]);
        assert!((400..=48 * 12 * 3 / 4).contains(&arrivals.held_by(48)), "{arrivals:?}");
        // They come one by one.
        arrivals.add(64, 64);
        assert!(arrivals.places_of(48) > 12 && arrivals.held_by(48) < 200, "{arrivals:?}");
        for _ in 0..10 {
            arrivals.add(64, 64);
        }
        assert_eq!((arrivals.places_of(48), arrivals.held_by(48)), (48, 48), "{arrivals:?}");
    }

    #[test]
    fn many_at_once_are_as_dense_as_they_are() {
        let mut arrivals = Arrivals::default();
        for _ in 0..10 {
            arrivals.add(256, 256);
        }
        assert_eq!((arrivals.places_of(48), arrivals.held_by(48)), (48, 48), "{arrivals:?}");
        for _ in 0..10 {
            arrivals.add(2560, 256);
        }
        assert!((350..=48 * 10 * 3 / 4).contains(&arrivals.held_by(48)), "{arrivals:?}");
    }

    #[test]
    fn impossible_numbers_do_no_harm() {
        let mut arrivals = Arrivals::default();
        for (datagrams, places) in [(0, 0), (0, 9), (u32::MAX, 1), (u32::MAX, u32::MAX), (5, 0)] {
            arrivals.add(datagrams, places);
            assert!(arrivals.places > 0 && arrivals.datagrams >= arrivals.places);
            assert!(arrivals.places_of(1000) >= 1000 / DENSEST);
        }
    }
}
