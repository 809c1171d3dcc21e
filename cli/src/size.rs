//! Sizes in bytes, as users type them: `64`, `64K`, `1M`, `1GiB`.

/// Parses a size of `MIN` to `MAX` bytes. K, M and G are 2¹⁰, 2²⁰ and 2³⁰ bytes; `i` and `B` may
/// follow them. Error: the text is no size, or the size is out of range.
pub fn size<const MIN: u32, const MAX: u32>(text: &str) -> Result<u32, String> {
    let bytes = bytes(text).ok_or("a size is a number of bytes, or of K, M or G: 64, 64K, 1GiB")?;
    let size = u32::try_from(bytes).ok().filter(|size| (MIN..=MAX).contains(size));
    size.ok_or_else(|| format!("{bytes} bytes: it may be {MIN} to {MAX}"))
}

fn bytes(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_users_type_them() {
        for (text, bytes) in
            [("0", 0), ("64", 64), ("64K", 65_536), ("64k", 65_536), ("1MiB", 1 << 20), ("2B", 2)]
        {
            assert_eq!(size::<0, { u32::MAX }>(text), Ok(bytes), "{text}");
        }
        assert_eq!(bytes("8GiB"), Some(8 << 30));
        for text in ["", "K", "1.5K", "-1", "64 K", "64Kb/s", "1T", "99999999999G"] {
            assert!(size::<0, { u32::MAX }>(text).unwrap_err().contains("1GiB"), "{text}");
        }
        assert!(size::<1, 4096>("8K").unwrap_err().contains("1 to 4096"));
        assert!(size::<1, 4096>("0").is_err());
    }
}
