//! Decoder of HPACK's Huffman code: RFC 7541, section 5.2 and appendix B.
//!
//! The code is canonical: the lengths alone define it. Nearly all symbols in use have codes of at most eight bits,
//! which one table decodes. Longer codes are found by a comparison with the last code of each length.

use super::HpackError;

/// Length in bits of each byte's code; the last is that of EOS.
#[rustfmt::skip]
const LENGTHS: [u8; SYMBOLS] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28,
    28, 28, 28, 28, 28, 28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6,
    5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10, 13, 6, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7,
    7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, 22, 21, 20, 22, 22, 23, 23, 21,
    23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24,
    21, 21, 26, 26, 28, 27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26, 30,
];

const SYMBOLS: usize = 257;
/// Symbol EOS, which must not be encoded.
const END: u16 = 256;
const MAX_CODE_LENGTH: usize = 30;

/// Decoding tables, computed at compile time.
struct Code {
    /// Symbol and code length by the next eight bits; length 0 for longer codes.
    short: [(u8, u8); 256],
    /// Symbols in the order of their codes.
    symbols: [u16; SYMBOLS],
    /// Index of the first symbol of each length.
    offset: [u32; MAX_CODE_LENGTH + 1],
    /// First code of each length.
    first: [u32; MAX_CODE_LENGTH + 1],
    /// Exclusive upper bound of the codes of each length, aligned to 32 bits.
    below: [u64; MAX_CODE_LENGTH + 1],
}

static CODE: Code = code();

const fn code() -> Code {
    let mut code = Code {
        short: [(0, 0); 256],
        symbols: [0; SYMBOLS],
        offset: [0; MAX_CODE_LENGTH + 1],
        first: [0; MAX_CODE_LENGTH + 1],
        below: [0; MAX_CODE_LENGTH + 1],
    };
    let (mut length, mut next, mut at) = (1, 0_u32, 0);
    while length <= MAX_CODE_LENGTH {
        next <<= 1;
        code.first[length] = next;
        code.offset[length] = at as u32;
        let mut symbol = 0;
        while symbol < SYMBOLS {
            if LENGTHS[symbol] as usize == length {
                code.symbols[at] = symbol as u16;
                at += 1;
                if length <= 8 {
                    let from = (next as usize) << (8 - length);
                    let mut fill = 0;
                    while fill < 1 << (8 - length) {
                        code.short[from + fill] = (symbol as u8, length as u8);
                        fill += 1;
                    }
                }
                next += 1;
            }
            symbol += 1;
        }
        code.below[length] = (next as u64) << (32 - length);
        length += 1;
    }
    code
}

/// Decodes a string and appends it to `out`.
///
/// # Errors
/// The string contains EOS, or its padding is not a prefix of EOS.
pub(super) fn decode(input: &[u8], out: &mut Vec<u8>) -> Result<(), HpackError> {
    let mut input = input;
    out.reserve(input.len() * 8 / 5);
    // Remaining bits, from the highest one.
    let (mut bits, mut count) = (0_u64, 0_u32);
    loop {
        // Fewer bits may be too few for the longest code.
        if count < 32 {
            if let Some((four, rest)) = input.split_first_chunk::<4>() {
                bits |= u64::from(u32::from_be_bytes(*four)) << (32 - count);
                count += 32;
                input = rest;
            } else {
                for byte in std::mem::take(&mut input) {
                    bits |= u64::from(*byte) << (56 - count);
                    count += 8;
                }
            }
        }
        let (byte, length) = CODE.short[(bits >> 56) as usize];
        let (symbol, length) = match length {
            0 => long(bits)?,
            _ => (u16::from(byte), u32::from(length)),
        };
        if length > count {
            // Padding: fewer than eight bits, all ones.
            let ones = !(u64::MAX >> count);
            return if count < 8 && bits == ones { Ok(()) } else { Err(HpackError) };
        }
        if symbol == END {
            return Err(HpackError);
        }
        out.push(symbol as u8);
        bits <<= length;
        count -= length;
    }
}

/// Decodes a code of more than eight bits.
#[cold]
fn long(bits: u64) -> Result<(u16, u32), HpackError> {
    let next = bits >> 32;
    let length = (9..=MAX_CODE_LENGTH).find(|length| next < CODE.below[*length]).ok_or(HpackError)?;
    let code = (next >> (32 - length)) as u32;
    let at = CODE.offset[length] + code.saturating_sub(CODE.first[length]);
    Ok((*CODE.symbols.get(at as usize).ok_or(HpackError)?, length as u32))
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Encodes a string. Only tests need it: inside a mesh, bytes cost less than the time to save them.
    pub(crate) fn encode(text: &[u8]) -> Vec<u8> {
        let (mut out, mut bits, mut count) = (Vec::new(), 0_u64, 0);
        for byte in text {
            let length = usize::from(LENGTHS[usize::from(*byte)]);
            let at = CODE.symbols.iter().position(|symbol| *symbol == u16::from(*byte)).unwrap();
            let code = CODE.first[length] + at as u32 - CODE.offset[length];
            bits = bits << length | u64::from(code);
            count += length;
            while count >= 8 {
                count -= 8;
                out.push((bits >> count) as u8);
            }
        }
        if count > 0 {
            out.push((bits << (8 - count)) as u8 | 0xff >> count);
        }
        out
    }

    fn decoded(bytes: &[u8]) -> Result<Vec<u8>, HpackError> {
        let mut out = Vec::new();
        decode(bytes, &mut out).map(|()| out)
    }

    #[test]
    fn examples_of_the_rfc_are_decoded() {
        let coded = [0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff];
        assert_eq!(decoded(&coded).unwrap(), b"www.example.com");
        assert_eq!(encode(b"www.example.com"), coded);
        assert_eq!(decoded(&[]).unwrap(), b"");
    }

    #[test]
    fn padding_is_short_and_all_ones() {
        assert_eq!(decoded(&[0x1f]).unwrap(), b"a");
        assert!(decoded(&[0x18]).is_err(), "zeros");
        assert!(decoded(&[0x1f, 0xff]).is_err(), "more than seven bits");
        assert!(decoded(&[0xff]).is_err(), "eight bits");
        assert!(decoded(&[0xff, 0xff, 0xff, 0xff]).is_err(), "the end itself");
    }

    proptest! {
        #[test]
        fn encoded_strings_are_decoded(text: Vec<u8>) {
            prop_assert_eq!(decoded(&encode(&text)).unwrap(), text);
        }

        #[test]
        fn the_encoding_of_a_string_is_unique(bytes: Vec<u8>) {
            if let Ok(text) = decoded(&bytes) {
                prop_assert_eq!(encode(&text), bytes);
            }
        }
    }
}
