//! Keys, from the bytes that a terminal sends.
//!
//! The parser of crossterm reads again and again from a terminal that has vanished, and waits for
//! the rest of half a sequence.

/// A key that means something here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Quit,
    /// Ctrl-C: the terminal sends no signal.
    Interrupt,
    Up,
    Down,
    PageUp,
    PageDown,
    Open,
    Close,
    SortLeft,
    SortRight,
    Reverse,
}

const ESCAPE: u8 = 0x1B;

/// The keys in bytes that were read at once.
pub(super) fn keys(mut bytes: &[u8]) -> Vec<Key> {
    let mut keys = Vec::new();
    while let [first, rest @ ..] = bytes {
        let (key, rest) = match (*first, rest) {
            // `ESC [ parameters letter`, ECMA-48, or `ESC O letter` of a keypad.
            (ESCAPE, [b'[' | b'O', rest @ ..]) => {
                let end = rest.iter().position(|byte| (0x40..=0x7E).contains(byte));
                let end = end.map_or(rest.len(), |at| at + 1);
                (of_sequence(&rest[..end]), &rest[end..])
            }
            (ESCAPE, rest) => (Some(Key::Close), rest),
            (byte, rest) => (of_byte(byte), rest),
        };
        keys.extend(key);
        bytes = rest;
    }
    keys
}

fn of_sequence(sequence: &[u8]) -> Option<Key> {
    Some(match sequence {
        b"A" => Key::Up,
        b"B" => Key::Down,
        b"C" => Key::Open,
        b"D" => Key::Close,
        b"5~" => Key::PageUp,
        b"6~" => Key::PageDown,
        _ => return None,
    })
}

fn of_byte(byte: u8) -> Option<Key> {
    Some(match byte {
        b'q' => Key::Quit,
        0x03 => Key::Interrupt,
        b'k' => Key::Up,
        b'j' => Key::Down,
        b'\r' | b'\n' => Key::Open,
        0x7F | 0x08 => Key::Close,
        b'<' | b',' => Key::SortLeft,
        b'>' | b'.' => Key::SortRight,
        b'r' => Key::Reverse,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_keys_and_the_unknown_is_none() {
        let all = [Key::Up, Key::PageDown, Key::Close, Key::Open, Key::Quit];
        assert_eq!(keys(b"\x1b[A\x1b[6~\x1bOD\rq"), all);
        assert_eq!(keys(b"\x1b"), [Key::Close]);
        assert_eq!(keys(b"\x1b[1;5A\x1b[200~x\xff\x00\x03"), [Key::Interrupt]);
        for half in [&b"\x1b["[..], b"\x1bO", b"\x1b[5", b"\x1b[1;"] {
            assert_eq!(keys(half), []);
        }
    }
}
