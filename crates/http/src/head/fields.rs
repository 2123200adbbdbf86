//! Header fields: a block of text with an index.
//!
//! Loading a head copies the block once. A change appends a line to the block and updates an index entry. The block
//! has the form of HTTP/1, so that adjacent fields are written in one piece.
//!
//! Most names that are looked up are missing. [`Names`], a set of 64 bits, answers such lookups at once.

use std::{fmt, ops::Range};

use super::case::NameCase;

/// Header fields in order. Names are in lower case.
#[derive(Default)]
pub struct Headers {
    text: Vec<u8>,
    index: Vec<Field>,
    /// Names of all fields since the last clear.
    names: Names,
    /// Names that more than one field may have.
    repeated: Names,
    /// Names as received, if they are preserved.
    case: Option<Box<NameCase>>,
}

impl PartialEq for Headers {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Clone for Headers {
    fn clone(&self) -> Self {
        let mut copy = Self::default();
        copy.clone_from(self);
        copy
    }

    /// Copies other fields into the memory of these.
    fn clone_from(&mut self, from: &Self) {
        let Self { text, index, names, repeated, case } = from;
        self.text.clone_from(text);
        self.index.clone_from(index);
        self.case.clone_from(case);
        (self.names, self.repeated) = (*names, *repeated);
    }
}

/// Position of a field in the text.
#[derive(Clone, Copy)]
struct Field {
    name: u32,
    name_len: u32,
    value: u32,
    value_len: u32,
    names: Names,
}

/// A set of names in lower case, with false positives: a name outside the set is certainly missing, a name in it may
/// be present.
#[derive(Clone, Copy, Default)]
pub struct Names(u64);

impl Names {
    /// The names that begin with `x-envoy-`. Many of them are removed from each request, and few requests have one.
    pub const ENVOY: Self = Self(1 << 63);

    /// Returns the set of these names.
    #[inline]
    pub const fn of(names: &[&str]) -> Self {
        let (mut set, mut at) = (0, 0);
        while at < names.len() {
            set |= Self::one(names[at].as_bytes()).0;
            at += 1;
        }
        Self(set)
    }

    /// Returns the set of one name. The factors distinguish the names that are common in heads or in lookups.
    #[inline]
    const fn one(name: &[u8]) -> Self {
        match name {
            [] => Self(1),
            [first, ..] => {
                let last = name[name.len() - 1] as usize;
                Self(1 << ((name.len() + *first as usize * 18 + last * 13) & 63))
            }
        }
    }

    /// Returns the union of all sets that contain this name.
    #[inline]
    fn of_field(name: &[u8]) -> Self {
        let family = if name.starts_with(b"x-envoy-") { Self::ENVOY.0 } else { 0 };
        Self(Self::one(name).0 | family)
    }

    /// Returns whether the sets have a common element.
    #[inline]
    const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

impl Headers {
    /// Returns the first value of a name (lower case).
    #[inline]
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        if !self.names.meets(Names::one(name.as_bytes())) {
            return None;
        }
        self.find(name)
    }

    fn find(&self, name: &str) -> Option<&[u8]> {
        self.index.iter().find(|field| self.named(field, name)).map(|field| self.value(field))
    }

    /// Returns all values of a name (lower case), in order.
    #[inline]
    pub fn header_values<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a [u8]> {
        let there = self.may_have(Names::one(name.as_bytes()));
        self.index.iter().filter(move |field| there && self.named(field, name)).map(|field| self.value(field))
    }

    /// Returns all fields in order; names are in lower case.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.index.iter().map(|field| (self.name(field), self.value(field)))
    }

    /// Returns whether a field has this name.
    #[inline]
    pub fn has(&self, name: &str) -> bool {
        self.header(name).is_some()
    }

    /// Returns whether a field may have one of these names.
    #[inline]
    pub fn may_have(&self, names: Names) -> bool {
        self.names.meets(names)
    }

    /// Replaces all fields of this name by one with a decimal number.
    #[inline]
    pub fn set_number(&mut self, name: &str, mut number: u64) {
        let mut digits = [0_u8; 20];
        let mut at = digits.len();
        loop {
            at -= 1;
            digits[at] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                break;
            }
        }
        self.set(name, &digits[at..]);
    }

    /// Replaces all fields of this name by one, at the position of the first.
    pub fn set(&mut self, name: &str, value: &[u8]) {
        let Some(at) = self.position(name) else { return self.append(name, value) };
        self.index[at] = self.store(name, value);
        if !self.index[at + 1..].iter().any(|field| self.named(field, name)) {
            return;
        }
        let text = &self.text;
        let mut position = 0;
        self.index.retain(|field| {
            position += 1;
            position <= at + 1 || slice(text, field.name, field.name_len) != name.as_bytes()
        });
    }

    /// Returns the position of the first field of this name in the index.
    fn position(&self, name: &str) -> Option<usize> {
        if !self.may_have(Names::one(name.as_bytes())) {
            return None;
        }
        self.index.iter().position(|field| self.named(field, name))
    }

    /// Appends a field.
    #[inline]
    pub fn append(&mut self, name: &str, value: &[u8]) {
        let field = self.store(name, value);
        self.add(field);
    }

    /// Appends a field whose name is known to be a token in lower case.
    #[inline]
    pub fn push(&mut self, name: &[u8], value: &[u8]) {
        let field = self.put(name, value);
        self.add(field);
    }

    /// Removes all fields of this name (lower case); returns whether there was one.
    #[inline]
    pub fn remove(&mut self, name: &str) -> bool {
        self.may_have(Names::one(name.as_bytes())) && self.take(name)
    }

    /// Removes the first field of this name (lower case); returns the position of its value in the text.
    pub(super) fn take_first(&mut self, name: &str) -> Option<Range<usize>> {
        let at = self.position(name)?;
        let Field { value, value_len, .. } = self.index.remove(at);
        Some(value as usize..(value + value_len) as usize)
    }

    /// Returns whether several fields may have this name (lower case).
    #[inline]
    pub fn may_repeat(&self, name: &str) -> bool {
        self.repeated.meets(Names::one(name.as_bytes()))
    }

    fn take(&mut self, name: &str) -> bool {
        let text = &self.text;
        let before = self.index.len();
        self.index.retain(|field| slice(text, field.name, field.name_len) != name.as_bytes());
        self.index.len() != before
    }

    /// Removes all fields for which `test` holds (name in lower case, value).
    #[inline]
    pub fn remove_if(&mut self, mut test: impl FnMut(&[u8], &[u8]) -> bool) {
        let text = &self.text;
        self.index.retain(|field| {
            !test(slice(text, field.name, field.name_len), slice(text, field.value, field.value_len))
        });
    }

    /// Removes all fields of these names. `set` contains the names.
    #[inline]
    pub fn remove_any(&mut self, names: &[&str], set: Names) {
        if self.may_have(set) {
            let text = &self.text;
            self.index.retain(|field| {
                let name = slice(text, field.name, field.name_len);
                !(set.meets(field.names) && names.iter().any(|other| other.as_bytes() == name))
            });
        }
    }

    /// Combines the fields of each of these names into one (RFC 9110, section 5.3). `set` contains the names.
    ///
    /// Called after a head has been read. Every decision then sees the whole value, as the receiver does. Otherwise a
    /// decision could use the first value and the receiver the last.
    pub fn combine(&mut self, names: &[&str], set: Names) {
        let suspects = Names(self.repeated.0 & set.0);
        if suspects.0 == 0 {
            return;
        }
        let mut at = 0;
        while let Some(field) = self.index.get(at) {
            at += 1;
            let name = self.name(field);
            let repeats = |other: &Field| other.names.0 == field.names.0 && self.name(other) == name;
            if !suspects.meets(field.names) || !self.index[at..].iter().any(repeats) {
                continue;
            }
            let Some(name) = names.iter().find(|listed| listed.as_bytes() == name) else { continue };
            let separator: &[u8] = if *name == "cookie" { b"; " } else { b"," };
            let values: Vec<&[u8]> = self.header_values(name).filter(|value| !value.is_empty()).collect();
            let combined = values.join(separator);
            self.set(name, &combined);
        }
    }

    /// Returns the number of fields.
    #[inline]
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Returns whether there are no fields.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Removes all fields; keeps the memory, unless an unusually large head made it grow.
    #[inline]
    pub fn clear(&mut self) {
        const KEPT: usize = 16 * 1024;
        self.text.clear();
        self.index.clear();
        (self.names, self.repeated) = (Names::default(), Names::default());
        self.case = None;
        if self.text.capacity() > KEPT {
            self.text = Vec::new();
        }
    }

    /// Returns whether the fields own memory, and little enough to keep.
    pub(super) fn is_worth_keeping(&self) -> bool {
        (1..=4 * 1024).contains(&self.text.capacity())
    }

    /// Loads a block of text. Its fields are then added by [`Self::index_field`].
    #[inline]
    pub fn load(&mut self, block: &[u8]) {
        self.clear();
        self.text.extend_from_slice(block);
    }

    /// Keeps the spelling of the names of a head as received. It lasts until the fields are cleared.
    #[cold]
    pub fn keep_case(&mut self, head: &[u8]) {
        self.case = NameCase::of(head);
    }

    /// Writes the names as received over those of an encoded head, if they are preserved.
    #[inline]
    pub fn restore_case(&self, head: &mut [u8]) {
        if let Some(case) = &self.case {
            case.restore(head);
        }
    }

    /// Returns the loaded text.
    #[inline]
    pub fn text(&self) -> &[u8] {
        &self.text
    }

    /// Returns the loaded text, for names to be converted to lower case.
    #[inline]
    pub fn text_mut(&mut self) -> &mut [u8] {
        &mut self.text
    }

    /// Adds a field of the loaded text, whose name is in lower case.
    #[inline]
    pub fn index_field(&mut self, name: Range<usize>, value: Range<usize>) {
        self.add(Field {
            name: offset(name.start),
            name_len: offset(name.len()),
            value: offset(value.start),
            value_len: offset(value.len()),
            names: Names::of_field(&self.text[name]),
        });
    }

    fn add(&mut self, field: Field) {
        self.repeated.0 |= self.names.0 & field.names.0;
        self.names.0 |= field.names.0;
        self.index.push(field);
    }

    /// Writes the fields in the form of HTTP/1, in as few pieces as possible. Leaves out the names for which `skip`
    /// holds; `skipped` contains these names.
    pub fn lines(&self, skipped: Names, skip: impl Fn(&[u8]) -> bool, mut piece: impl FnMut(&[u8])) {
        let mut run = 0..0;
        for field in &self.index {
            let name = field.name as usize..(field.name + field.name_len) as usize;
            let value = field.value as usize..(field.value + field.value_len) as usize;
            if skipped.meets(field.names) && skip(&self.text[name.clone()]) {
                continue;
            }
            let end = value.end + 2;
            let as_written = name.end + 2 == value.start
                && self.text[name.end..value.start] == *b": "
                && self.text.get(value.end..end) == Some(b"\r\n");
            if as_written && name.start == run.end {
                run.end = end;
                continue;
            }
            piece(&self.text[std::mem::replace(&mut run, 0..0)]);
            if as_written {
                run = name.start..end;
            } else {
                piece(&self.text[name]);
                piece(b": ");
                piece(&self.text[value]);
                piece(b"\r\n");
            }
        }
        piece(&self.text[run]);
    }

    #[inline]
    fn store(&mut self, name: &str, value: &[u8]) -> Field {
        let at = self.text.len();
        let mut field = self.put(name.as_bytes(), value);
        let name = &mut self.text[at..at + name.len()];
        name.make_ascii_lowercase();
        field.names = Names::of_field(name);
        field
    }

    /// Appends a line to the text.
    fn put(&mut self, name: &[u8], value: &[u8]) -> Field {
        let at = self.text.len();
        self.text.reserve(name.len() + value.len() + 4);
        self.text.extend_from_slice(name);
        self.text.extend_from_slice(b": ");
        let start = self.text.len();
        self.text.extend_from_slice(value);
        self.text.extend_from_slice(b"\r\n");
        Field {
            name: offset(at),
            name_len: offset(name.len()),
            value: offset(start),
            value_len: offset(value.len()),
            names: Names::of_field(name),
        }
    }

    fn name(&self, field: &Field) -> &[u8] {
        slice(&self.text, field.name, field.name_len)
    }

    fn value(&self, field: &Field) -> &[u8] {
        slice(&self.text, field.value, field.value_len)
    }

    fn named(&self, field: &Field, name: &str) -> bool {
        field.name_len as usize == name.len() && self.name(field) == name.as_bytes()
    }
}

impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.iter().map(|(name, value)| {
                (String::from_utf8_lossy(name).into_owned(), String::from_utf8_lossy(value).into_owned())
            }))
            .finish()
    }
}

fn slice(text: &[u8], start: u32, len: u32) -> &[u8] {
    &text[start as usize..(start + len) as usize]
}

/// The limits of the codecs keep heads far below 4 GiB.
fn offset(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_replaced_and_removed() {
        let mut head = Headers::default();
        for (name, value) in [("X-One", "1"), ("cookie", "a"), ("Cookie", "b"), ("x-two", "2")] {
            head.append(name, value.as_bytes());
        }
        assert_eq!(head.header("x-one"), Some(&b"1"[..]));
        assert_eq!(head.header_values("cookie").collect::<Vec<_>>(), [b"a", b"b"]);
        head.set("cookie", b"all");
        assert_eq!(head.header_values("cookie").collect::<Vec<_>>(), [b"all"]);
        let names: Vec<_> = head.iter().map(|(name, _)| name.to_vec()).collect();
        assert_eq!(names, [&b"x-one"[..], b"cookie", b"x-two"]);
        assert!(head.remove("x-one") && !head.remove("x-one"));
        for name in ["x-envoy-one", "x-envoy-two"] {
            head.append(name, b"");
        }
        head.remove_any(&["x-envoy-one", "x-two"], Names::ENVOY);
        assert!(head.has("x-envoy-two") && head.has("x-two") && !head.has("x-envoy-one"));
        assert!(head.remove("x-envoy-two"));
        head.set("new", b"");
        assert_eq!(head.header("new"), Some(&b""[..]));
        assert_eq!(head.len(), 3);
    }

    #[test]
    fn repeated_fields_of_listed_names_are_combined() {
        const LISTED: [&str; 3] = ["accept", "cookie", "via"];
        let combined = |fields: &[(&str, &str)]| {
            let mut head = Headers::default();
            fields.iter().for_each(|(name, value)| head.append(name, value.as_bytes()));
            head.combine(&LISTED, Names::of(&LISTED));
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            head.iter().map(|(name, value)| text(name) + "=" + &text(value)).collect::<Vec<_>>()
        };
        let all =
            [("Accept", "1"), ("x", "a"), ("accept", ""), ("x", "b"), ("cookie", "c"), ("ACCEPT", "2, 3")];
        assert_eq!(combined(&all), ["accept=1,2, 3", "x=a", "x=b", "cookie=c"]);
        assert_eq!(combined(&[("cookie", "a"), ("via", "1"), ("cookie", "b")]), ["cookie=a; b", "via=1"]);
        assert_eq!(combined(&[("via", ""), ("via", "")]), ["via="]);
        assert_eq!(combined(&[("via", "1"), ("accept", "2")]), ["via=1", "accept=2"]);
        assert_eq!(combined(&[]), [""; 0]);
    }
}
