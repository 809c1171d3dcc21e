//! All tables in their `Debug` form, to check that an action changes nothing.

use std::fmt::Debug;

/// The whole state of `of`, without its counters.
#[must_use]
pub(crate) fn tables(of: &impl Debug) -> String {
    let mut text = format!("{of:?}");
    for counters in ["Counters {", "Drops {"] {
        while let Some(at) = text.find(counters) {
            let len = text[at..].find('}').expect("counters are plain numbers");
            text.replace_range(at..=at + len, "");
        }
    }
    text
}

/// Fails at the first difference.
#[track_caller]
pub(crate) fn assert_same(before: &str, after: &str, what: &dyn Debug) {
    if before == after {
        return;
    }
    let differs = |(a, b): (u8, u8)| a != b;
    let at = before.bytes().zip(after.bytes()).position(differs);
    let at = at.unwrap_or(before.len().min(after.len()));
    let near = |text: &str| {
        let bytes = &text.as_bytes()[at.saturating_sub(120)..(at + 60).min(text.len())];
        String::from_utf8_lossy(bytes).into_owned()
    };
    panic!("{what:?} changed something:\n… {} …\n… {} …", near(before), near(after));
}
