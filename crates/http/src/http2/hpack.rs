//! HPACK: header fields as bytes (RFC 7541).
//!
//! [`Decoder`] hands out fields as they lie in the block or the table, without copying them. [`Encoder`] puts a field
//! into the table once it has come by twice, so that what differs from request to request never pushes out what does
//! not; it writes texts plainly, as their Huffman code would cost more time than the bytes it saves.

mod huffman;
mod table;

use std::hash::{BuildHasher as _, Hasher as _};

use table::{Name, Table, static_name};

/// Size of the tables, either way, unless the peer wants less for ours. It is what both ends begin with.
pub(super) const TABLE: usize = 4096;

/// Most bytes of names that one block may have copied from entries of the table into new ones. A few bytes of a block are
/// enough to copy the longest name, and no head has that many long names.
const COPIED: usize = 16 * TABLE;

/// Bytes that are no header block. Nothing after them can be understood (section 4.3 of RFC 9113).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HpackError;

/// Reads header blocks, one after the other.
pub(super) struct Decoder {
    table: Table,
    /// Texts that came in Huffman code.
    name: Vec<u8>,
    value: Vec<u8>,
}

impl Decoder {
    /// At the beginning of a connection.
    pub(super) fn new() -> Self {
        Self { table: Table::new(TABLE), name: Vec::new(), value: Vec::new() }
    }

    /// Reads a whole block and gives each name and value to `field`.
    pub(super) fn decode(
        &mut self,
        mut block: &[u8],
        mut field: impl FnMut(&[u8], &[u8]),
    ) -> Result<(), HpackError> {
        let (mut begun, mut copied) = (false, 0);
        while let [first, ..] = block {
            match first {
                // An index.
                0x80.. => {
                    let index = integer(&mut block, 7)?;
                    let (name, value) = self.table.get(index).ok_or(HpackError)?;
                    field(name, value);
                }
                // Another size of the table, before the first field only (section 4.2).
                0x20..=0x3f => {
                    let size = integer(&mut block, 5)?;
                    if begun || size > TABLE {
                        return Err(HpackError);
                    }
                    self.table.resize(size);
                    continue;
                }
                // A text, which goes into the table.
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

    /// Returns how many bytes of a name were copied.
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

/// A number, whose beginning is the lowest `prefix` bits of the first byte (section 5.1).
fn integer(block: &mut &[u8], prefix: u32) -> Result<usize, HpackError> {
    let [first, rest @ ..] = *block else { return Err(HpackError) };
    let mask = (1_usize << prefix) - 1;
    let mut number = usize::from(*first) & mask;
    let mut rest = rest;
    if number == mask {
        // Four bytes are more than any length or index here needs.
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

/// A text, in the block or, if it was in Huffman code, in `space` (section 5.2).
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

/// Writes header blocks, one after the other.
pub(super) struct Encoder {
    table: Table,
    /// By the lowest bits of their hashes, fields that have come by, the later one first. With one place for each hash, two
    /// fields of every request that have the same would keep pushing each other out.
    seen: Box<[[Seen; 2]]>,
    hashes: foldhash::fast::RandomState,
    /// A size of the table that the peer does not know of yet, and the smallest since it last did.
    resized: Option<usize>,
}

#[derive(Clone, Copy, Default)]
struct Seen {
    hash: u32,
    /// Its number in the table; 0 if it has come by only once.
    number: u32,
}

/// Half of how many fields are remembered: some times as many as the table can hold.
const SEEN: usize = 128;

impl Encoder {
    /// At the beginning of a connection.
    pub(super) fn new() -> Self {
        Self {
            table: Table::new(TABLE),
            seen: vec![[Seen::default(); 2]; SEEN].into(),
            hashes: foldhash::fast::RandomState::default(),
            resized: None,
        }
    }

    /// Heeds how large the peer lets the table be.
    pub(super) fn resize(&mut self, size: usize) {
        let size = size.min(TABLE);
        if size != self.table.max() {
            self.resized = Some(self.resized.map_or(size, |smallest| smallest.min(size)));
            self.table.resize(size);
        }
    }

    /// Begins a block.
    pub(super) fn begin(&mut self, out: &mut Vec<u8>) {
        if let Some(smallest) = self.resized.take() {
            // If it was smaller meanwhile the peer must let go of the same fields (section 4.2).
            if smallest < self.table.max() {
                number(out, 0x20, 5, smallest);
            }
            number(out, 0x20, 5, self.table.max());
        }
    }

    /// Writes a field of the fixed table.
    pub(super) fn indexed(&mut self, out: &mut Vec<u8>, index: u8) {
        out.push(0x80 | index);
    }

    /// Writes a field, whose name is in lower case.
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
            // Large ones would push out all others.
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

    /// Where a field is remembered, and as what.
    fn hash(&self, name: &[u8], value: &[u8]) -> (usize, u32) {
        let mut hasher = self.hashes.build_hasher();
        hasher.write(name);
        hasher.write(value);
        let hash = hasher.finish();
        (hash as usize % SEEN, (hash >> 32) as u32)
    }
}

/// What nobody on the way may put into a table, where others could guess at it (section 7.1.3).
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

/// Writes a number whose beginning is the lowest `prefix` bits of a byte with this pattern.
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
