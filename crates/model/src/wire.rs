//! Fields of encoded messages.

use prost::encoding::{WireType, decode_key, decode_varint};

/// A field of an encoded message.
pub(crate) struct EncodedField<'a> {
    /// Number.
    pub number: u32,
    /// Key and value.
    pub bytes: &'a [u8],
    /// Value without its length: a text, bytes, a message, or packed numbers. `None` for other types.
    pub content: Option<&'a [u8]>,
}

impl<'a> EncodedField<'a> {
    /// Takes the first field from the bytes. Returns `None` if they are not a message, or contain a group.
    pub(crate) fn take(rest: &mut &'a [u8]) -> Option<Self> {
        let start = *rest;
        let (number, wire) = decode_key(rest).ok()?;
        let mut content = None;
        match wire {
            WireType::Varint => drop(decode_varint(rest).ok()?),
            WireType::ThirtyTwoBit => *rest = rest.split_at_checked(4)?.1,
            WireType::SixtyFourBit => *rest = rest.split_at_checked(8)?.1,
            WireType::LengthDelimited => {
                let length = usize::try_from(decode_varint(rest).ok()?).ok()?;
                let (value, behind) = rest.split_at_checked(length)?;
                (content, *rest) = (Some(value), behind);
            }
            WireType::StartGroup | WireType::EndGroup => return None,
        }
        let bytes = start.get(..start.len() - rest.len())?;
        Some(Self { number, bytes, content })
    }
}
