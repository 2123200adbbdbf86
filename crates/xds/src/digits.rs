//! Numbers as text, without an allocation: each response to each client has several.

/// Digits of hexadecimal numbers.
const DIGITS: &[u8; 16] = b"0123456789abcdef";

/// A decimal number.
pub(crate) struct Decimal {
    /// The number is at the end.
    bytes: [u8; 20],
    start: usize,
}

impl Decimal {
    pub(crate) fn new(mut number: u64) -> Self {
        let mut text = Self { bytes: [b'0'; 20], start: 20 };
        for (index, byte) in text.bytes.iter_mut().enumerate().rev() {
            *byte = DIGITS[(number % 10) as usize];
            text.start = index;
            number /= 10;
            if number == 0 {
                break;
            }
        }
        text
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(self.start..).unwrap_or_default()
    }
}

/// Returns a number as 16 hexadecimal digits.
pub(crate) fn hex(number: u64) -> [u8; 16] {
    std::array::from_fn(|index| DIGITS[(number >> (60 - 4 * index)) as usize & 15])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_those_of_the_standard_library() {
        for number in [0, 1, 9, 10, 99, 100, 4_096, u64::from(u32::MAX), u64::MAX] {
            assert_eq!(Decimal::new(number).as_bytes(), number.to_string().as_bytes());
            assert_eq!(&hex(number), format!("{number:016x}").as_bytes());
        }
    }
}
