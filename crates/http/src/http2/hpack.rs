//! HPACK: compression of header fields (RFC 7541).
//!
//! [`Decoder`] passes on fields where they are, in the block or in the table, without a copy. [`Encoder`] adds a field
//! to the table at its second occurrence, so that fields that differ between requests do not evict the others. It does
//! not use the Huffman code: inside a mesh, the time costs more than the saved bytes.

mod huffman;
mod table;

use std::hash::{BuildHasher as _, Hasher as _};

use table::{Name, Table, static_name};

/// Size of both tables in bytes: the initial size in the RFC. The peer may request a smaller one for the encoder.
pub(super) const TABLE: usize = 4096;

/// Maximum number of bytes of names that one block may copy from table entries into new entries. A few bytes of a
/// block suffice to copy the longest name, and no valid head has so many long names.
const COPIED: usize = 16 * TABLE;

/// The bytes are no valid header block. The connection cannot continue (RFC 9113, section 4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HpackError;

/// Decoder of consecutive header blocks.
pub(super) struct Decoder {
    table: Table,
    /// Buffers for Huffman-coded strings.
    name: Vec<u8>,
    value: Vec<u8>,
}

impl Decoder {
    /// Returns the decoder of a new connection.
    pub(super) fn new() -> Self {
        Self { table: Table::new(TABLE), name: Vec::new(), value: Vec::new() }
    }

    /// Decodes a complete block; calls `field` with each name and value.
    pub(super) fn decode(
        &mut self,
        mut block: &[u8],
        mut field: impl FnMut(&[u8], &[u8]),
    ) -> Result<(), HpackError> {
        let (mut begun, mut copied) = (false, 0);
        while let [first, ..] = block {
            match first {
                // Indexed field.
                0x80.. => {
                    let index = integer(&mut block, 7)?;
                    let (name, value) = self.table.get(index).ok_or(HpackError)?;
                    field(name, value);
                }
                // Table size update, allowed only before the first field (section 4.2).
                0x20..=0x3f => {
                    let size = integer(&mut block, 5)?;
                    if begun || size > TABLE {
                        return Err(HpackError);
                    }
                    self.table.resize(size);
                    continue;
                }
                // Literal that is added to the table.
                0x40.. => copied += self.literal(&mut block, 6, true, &mut field)?,
                _ => _ = self.literal(&mut block, 4, false, &mut field)?,
            }
            if copied > COPIED {
                return Err(HpackError);
            }
            begun = true;
        }
        Ok(())
    }

    /// Decodes a literal. Returns the number of bytes of the name that were copied from the table.
    fn literal(
        &mut self,
        block: &mut &[u8],
        prefix: u32,
        keep: bool,
        field: &mut impl FnMut(&[u8], &[u8]),
    ) -> Result<usize, HpackError> {
        let index = integer(block, prefix)?;
        let plain = if index == 0 { text(block, &mut self.name)? } else { b"" };
        let value = text(block, &mut self.value)?;
        let name = if index == 0 { plain } else { self.table.get(index).ok_or(HpackError)?.0 };
        field(name, value);
        let copied = if index == 0 { 0 } else { name.len() };
        if keep {
            let name = if index == 0 { Name::Text(plain) } else { Name::Index(index) };
            self.table.insert(name, value).ok_or(HpackError)?;
        }
        Ok(copied)
    }
}

/// Decodes an integer with a prefix of this number of bits (section 5.1).
fn integer(block: &mut &[u8], prefix: u32) -> Result<usize, HpackError> {
    let [first, rest @ ..] = *block else { return Err(HpackError) };
    let mask = (1_usize << prefix) - 1;
    let mut number = usize::from(*first) & mask;
    let mut rest = rest;
    if number == mask {
        // Four more bytes can encode every length and index that is used here.
        let mut shift = 0;
        loop {
            let [byte, after @ ..] = rest else { return Err(HpackError) };
            if shift > 21 {
                return Err(HpackError);
            }
            number += usize::from(byte & 0x7f) << shift;
            shift += 7;
            rest = after;
            if byte & 0x80 == 0 {
                break;
            }
        }
    }
    *block = rest;
    Ok(number)
}

/// Decodes a string; a Huffman-coded one is stored in `space` (section 5.2).
fn text<'s, 'b: 's>(block: &mut &'b [u8], space: &'s mut Vec<u8>) -> Result<&'s [u8], HpackError> {
    let coded = block.first().ok_or(HpackError)? & 0x80 != 0;
    let length = integer(block, 7)?;
    let (text, rest) = block.split_at_checked(length).ok_or(HpackError)?;
    *block = rest;
    if !coded {
        return Ok(text);
    }
    space.clear();
    huffman::decode(text, space)?;
    Ok(space)
}

/// Encoder of consecutive header blocks.
pub(super) struct Encoder {
    table: Table,
    /// Recent fields in slots by the low bits of their hashes, the latest first. A slot has two entries, so that two
    /// fields of every request in one slot do not evict each other.
    seen: Box<[[Seen; 2]]>,
    hashes: foldhash::fast::RandomState,
    /// Smallest table size since the last one that was sent to the peer; `None` without a change.
    resized: Option<usize>,
}

#[derive(Clone, Copy, Default)]
struct Seen {
    hash: u32,
    /// Number of the field in the table; 0 after its first occurrence.
    number: u32,
}

/// Number of slots in [`Encoder::seen`]. A table of 4,096 bytes holds fewer fields: at most 124.
const SEEN: usize = 128;

impl Encoder {
    /// Returns the encoder of a new connection.
    pub(super) fn new() -> Self {
        Self {
            table: Table::new(TABLE),
            seen: vec![[Seen::default(); 2]; SEEN].into(),
            hashes: foldhash::fast::RandomState::default(),
            resized: None,
        }
    }

    /// Applies the maximum table size of the peer.
    pub(super) fn resize(&mut self, size: usize) {
        let size = size.min(TABLE);
        if size != self.table.max() {
            self.resized = Some(self.resized.map_or(size, |smallest| smallest.min(size)));
            self.table.resize(size);
        }
    }

    /// Begins a block; writes a change of the table size, if any.
    pub(super) fn begin(&mut self, out: &mut Vec<u8>) {
        if let Some(smallest) = self.resized.take() {
            // If the size was smaller in between, the peer must evict the same fields (section 4.2).
            if smallest < self.table.max() {
                number(out, 0x20, 5, smallest);
            }
            number(out, 0x20, 5, self.table.max());
        }
    }

    /// Encodes a field of the static table.
    pub(super) fn indexed(&mut self, out: &mut Vec<u8>, index: u8) {
        out.push(0x80 | index);
    }

    /// Encodes a field, whose name is in lower case.
    pub(super) fn field(&mut self, out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
        if is_secret(name) {
            return literal(out, 0x10, 4, name, value);
        }
        let (slot, hash) = self.hash(name, value);
        let [seen, earlier] = &mut self.seen[slot];
        if seen.hash != hash {
            std::mem::swap(seen, earlier);
        }
        if seen.hash == hash {
            if seen.number != 0
                && let Some(index) = self.table.index(seen.number)
                && self.table.get(index) == Some((name, value))
            {
                return number(out, 0x80, 7, index);
            }
            // Large fields would evict all others.
            if name.len() + value.len() < self.table.max() / 4
                && let Some(number) = self.table.insert(Name::Text(name), value)
            {
                seen.number = number;
                return literal(out, 0x40, 6, name, value);
            }
        }
        *seen = Seen { hash, number: 0 };
        literal(out, 0, 4, name, value);
    }

    /// Returns the slot and the hash of a field.
    fn hash(&self, name: &[u8], value: &[u8]) -> (usize, u32) {
        let mut hasher = self.hashes.build_hasher();
        hasher.write(name);
        hasher.write(value);
        let hash = hasher.finish();
        (hash as usize % SEEN, (hash >> 32) as u32)
    }
}

/// Returns whether a field must not be in any table, because an attacker could guess its value (section 7.1.3).
fn is_secret(name: &[u8]) -> bool {
    matches!(name, b"authorization" | b"cookie" | b"proxy-authorization" | b"set-cookie")
}

fn literal(out: &mut Vec<u8>, pattern: u8, prefix: u32, name: &[u8], value: &[u8]) {
    match static_name(name) {
        Some(index) => number(out, pattern, prefix, index),
        None => {
            out.push(pattern);
            number(out, 0, 7, name.len());
            out.extend_from_slice(name);
        }
    }
    number(out, 0, 7, value.len());
    out.extend_from_slice(value);
}

/// Encodes an integer with a prefix of this number of bits, in a byte with this pattern.
fn number(out: &mut Vec<u8>, pattern: u8, prefix: u32, number: usize) {
    let mask = (1 << prefix) - 1;
    if number < mask {
        out.push(pattern | number as u8);
        return;
    }
    out.push(pattern | mask as u8);
    let mut rest = number - mask;
    while rest >= 0x80 {
        out.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}

#[cfg(test)]
mod tests;
