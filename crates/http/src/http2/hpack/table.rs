//! The tables of HPACK: the static table (RFC 7541, appendix A) and the dynamic table (sections 2.3.2 and 4).

use std::collections::VecDeque;

/// Size of an entry in addition to its bytes.
const OVERHEAD: usize = 32;

/// The dynamic table, latest field first. All bytes are in one block, so that entries need no allocations.
#[derive(Default)]
pub(super) struct Table {
    /// Names and values, oldest first. Bytes before the oldest entry are unused.
    text: Vec<u8>,
    entries: VecDeque<Entry>,
    size: usize,
    max: usize,
    /// Number of insertions since the beginning.
    inserted: u32,
}

#[derive(Clone, Copy)]
struct Entry {
    at: usize,
    name: usize,
    value: usize,
}

impl Entry {
    fn size(&self) -> usize {
        self.name + self.value + OVERHEAD
    }
}

/// Source of a name.
pub(super) enum Name<'a> {
    Index(usize),
    Text(&'a [u8]),
}

impl Table {
    /// Returns an empty table with this maximum size.
    pub(super) fn new(max: usize) -> Self {
        Self { max, ..Self::default() }
    }

    /// Returns the maximum size.
    pub(super) fn max(&self) -> usize {
        self.max
    }

    /// Sets the maximum size; evicts entries beyond it.
    pub(super) fn resize(&mut self, max: usize) {
        self.max = max;
        self.evict(0);
    }

    /// Returns the field at an index. Indices start at 1 in the static table and continue in the dynamic one.
    pub(super) fn get(&self, index: usize) -> Option<(&[u8], &[u8])> {
        if let Some((name, value)) = STATIC.get(index.checked_sub(1)?) {
            return Some((name.as_bytes(), value.as_bytes()));
        }
        let entry = self.entry(index)?;
        let (name, value) = self.text.get(entry.at..)?.split_at_checked(entry.name)?;
        Some((name, value.get(..entry.value)?))
    }

    /// Returns the entry at an index beyond the static table.
    fn entry(&self, index: usize) -> Option<Entry> {
        let latest = index.checked_sub(STATIC.len() + 1)?;
        self.entries.get(self.entries.len().checked_sub(latest + 1)?).copied()
    }

    /// Inserts a field and returns its number; returns `None` if the name does not exist.
    pub(super) fn insert(&mut self, name: Name<'_>, value: &[u8]) -> Option<u32> {
        let at = self.text.len();
        match name {
            Name::Text(text) => self.text.extend_from_slice(text),
            Name::Index(index) => match STATIC.get(index.checked_sub(1)?) {
                Some((text, _)) => self.text.extend_from_slice(text.as_bytes()),
                None => {
                    let entry = self.entry(index)?;
                    self.text.extend_from_within(entry.at..entry.at + entry.name);
                }
            },
        }
        let entry = Entry { at, name: self.text.len() - at, value: value.len() };
        self.inserted = self.inserted.wrapping_add(1);
        // A field larger than the table empties it (section 4.4).
        self.evict(entry.size());
        if entry.size() <= self.max {
            self.text.extend_from_slice(value);
            self.size += entry.size();
            self.entries.push_back(entry);
        } else {
            self.text.truncate(at);
        }
        self.compact();
        Some(self.inserted)
    }

    /// Returns the index of the field with this number, if it is still in the table.
    pub(super) fn index(&self, number: u32) -> Option<usize> {
        let latest = self.inserted.wrapping_sub(number) as usize;
        (latest < self.entries.len()).then(|| STATIC.len() + 1 + latest)
    }

    fn evict(&mut self, more: usize) {
        while self.size + more > self.max {
            let Some(oldest) = self.entries.pop_front() else { break };
            self.size -= oldest.size();
        }
    }

    /// Removes unused bytes when they exceed the maximum size of the table and 1 KiB.
    fn compact(&mut self) {
        let unused = self.entries.front().map_or(self.text.len(), |oldest| oldest.at);
        if unused > self.max.max(1024) {
            self.text.drain(..unused);
            self.entries.iter_mut().for_each(|entry| entry.at -= unused);
        }
    }
}

/// Returns the index of a name in the static table.
pub(super) fn static_name(name: &[u8]) -> Option<usize> {
    let alike = match name.len() {
        3 => [21, 60].as_slice(),
        4 => &[33, 34, 37, 38, 45, 59],
        5 => &[4, 22, 50],
        6 => &[19, 32, 35, 54],
        7 => &[2, 6, 8, 36, 51, 52],
        8 => &[39, 42, 46],
        10 => &[1, 55, 58],
        11 => &[53],
        12 => &[31, 47],
        13 => &[18, 23, 24, 30, 41, 44],
        14 => &[15, 28],
        15 => &[16, 17],
        16 => &[26, 27, 29, 61],
        17 => &[40, 57],
        18 => &[48],
        19 => &[25, 43, 49],
        25 => &[56],
        27 => &[20],
        _ => &[],
    };
    alike.iter().copied().find(|index| STATIC[index - 1].0.as_bytes() == name)
}

/// The static table.
pub(super) const STATIC: [(&str, &str); 61] = [
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    (":status", "200"),
    (":status", "204"),
    (":status", "206"),
    (":status", "304"),
    (":status", "400"),
    (":status", "404"),
    (":status", "500"),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    ("accept-language", ""),
    ("accept-ranges", ""),
    ("accept", ""),
    ("access-control-allow-origin", ""),
    ("age", ""),
    ("allow", ""),
    ("authorization", ""),
    ("cache-control", ""),
    ("content-disposition", ""),
    ("content-encoding", ""),
    ("content-language", ""),
    ("content-length", ""),
    ("content-location", ""),
    ("content-range", ""),
    ("content-type", ""),
    ("cookie", ""),
    ("date", ""),
    ("etag", ""),
    ("expect", ""),
    ("expires", ""),
    ("from", ""),
    ("host", ""),
    ("if-match", ""),
    ("if-modified-since", ""),
    ("if-none-match", ""),
    ("if-range", ""),
    ("if-unmodified-since", ""),
    ("last-modified", ""),
    ("link", ""),
    ("location", ""),
    ("max-forwards", ""),
    ("proxy-authenticate", ""),
    ("proxy-authorization", ""),
    ("range", ""),
    ("referer", ""),
    ("refresh", ""),
    ("retry-after", ""),
    ("server", ""),
    ("set-cookie", ""),
    ("strict-transport-security", ""),
    ("transfer-encoding", ""),
    ("user-agent", ""),
    ("vary", ""),
    ("via", ""),
    ("www-authenticate", ""),
];
