//! Embedded database in a file, with redb.
//!
//! A change is in effect at once and on the disk within [`FLUSH`], as with MongoDB's default, which Acme Air uses. A
//! crash loses at most the changes of that time.

use std::{
    fs::File,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use redb::{
    Database, Durability, ReadableDatabase as _, ReadableTable as _, ReadableTableMetadata as _,
    TableDefinition, backends::FileBackend,
};

/// Documents as JSON by their IDs.
const DOCUMENTS: TableDefinition<'_, &str, &str> = TableDefinition::new("documents");
/// Maximum time until a change is on the disk.
const FLUSH: Duration = Duration::from_millis(100);
/// Maximum memory of cached pages in bytes.
const CACHE: usize = 64 << 20;

/// The database, and whether it has changes that are not on the disk.
pub(super) struct EmbeddedStore {
    database: Arc<Database>,
    changed: Arc<AtomicBool>,
}

impl EmbeddedStore {
    /// Opens the database in an empty file or in one that it has written.
    pub(super) fn open(file: File) -> anyhow::Result<Self> {
        let database =
            Database::builder().set_cache_size(CACHE).create_with_backend(FileBackend::new(file)?)?;
        let transaction = database.begin_write()?;
        transaction.open_table(DOCUMENTS)?;
        transaction.commit()?;
        let store = Self { database: Arc::new(database), changed: Arc::default() };
        tokio::spawn(flush(Arc::downgrade(&store.database), Arc::clone(&store.changed)));
        Ok(store)
    }

    pub(super) async fn get(&self, id: &str) -> anyhow::Result<Option<String>> {
        let table = self.database.begin_read()?.open_table(DOCUMENTS)?;
        Ok(table.get(id)?.map(|text| text.value().to_owned()))
    }

    pub(super) async fn starting_with(&self, prefix: &str) -> anyhow::Result<Vec<String>> {
        let table = self.database.begin_read()?.open_table(DOCUMENTS)?;
        let found = table.range(prefix..super::end_of(prefix).as_str())?;
        found.map(|entry| Ok(entry?.1.value().to_owned())).collect()
    }

    pub(super) async fn put(&self, id: &str, text: &str) -> anyhow::Result<()> {
        let (id, text) = (id.to_owned(), text.to_owned());
        self.write(move |table| Ok(table.insert(&*id, &*text).map(|_| ())?)).await
    }

    /// Replaces a document if it is still the expected one.
    pub(super) async fn swap(&self, id: &str, before: &str, after: &str) -> anyhow::Result<bool> {
        let (id, before, after) = (id.to_owned(), before.to_owned(), after.to_owned());
        self.write(move |table| {
            let is_expected = table.get(&*id)?.is_some_and(|text| text.value() == before);
            if is_expected {
                table.insert(&*id, &*after)?;
            }
            Ok(is_expected)
        })
        .await
    }

    pub(super) async fn remove(&self, id: &str) -> anyhow::Result<Option<String>> {
        let id = id.to_owned();
        self.write(move |table| Ok(table.remove(&*id)?.map(|text| text.value().to_owned()))).await
    }

    pub(super) async fn load(&self, documents: Vec<(String, String)>) -> anyhow::Result<()> {
        self.write(move |table| {
            table.retain(|_, _| false)?;
            for (id, text) in &documents {
                table.insert(&**id, &**text)?;
            }
            Ok(())
        })
        .await
    }

    pub(super) async fn count(&self) -> anyhow::Result<u64> {
        Ok(self.database.begin_read()?.open_table(DOCUMENTS)?.len()?)
    }

    /// Runs a change in a transaction, on a thread that may wait for the disk. Reads do not wait.
    async fn write<T: Send + 'static>(
        &self,
        change: impl FnOnce(&mut redb::Table<'_, &str, &str>) -> anyhow::Result<T> + Send + 'static,
    ) -> anyhow::Result<T> {
        let (database, changed) = (Arc::clone(&self.database), Arc::clone(&self.changed));
        let written = tokio::task::spawn_blocking(move || {
            let mut transaction = database.begin_write()?;
            transaction.set_durability(Durability::None)?;
            let result = change(&mut transaction.open_table(DOCUMENTS)?)?;
            transaction.commit()?;
            changed.store(true, Ordering::Release);
            Ok(result)
        });
        written.await.context("the change of the database did not end")?
    }
}

impl Drop for EmbeddedStore {
    /// Writes the last changes to the disk.
    fn drop(&mut self) {
        if self.changed.swap(false, Ordering::AcqRel)
            && let Err(error) = durable(&self.database)
        {
            tracing::error!(error = format!("{error:#}"), "cannot write the database to the disk");
        }
    }
}

/// Makes all earlier transactions durable, by an empty one that is.
fn durable(database: &Database) -> anyhow::Result<()> {
    Ok(database.begin_write()?.commit()?)
}

/// Writes changes to the disk until the store is dropped.
async fn flush(database: std::sync::Weak<Database>, changed: Arc<AtomicBool>) {
    loop {
        tokio::time::sleep(FLUSH).await;
        let Some(database) = database.upgrade() else { return };
        if !changed.swap(false, Ordering::AcqRel) {
            continue;
        }
        let flushed = tokio::task::spawn_blocking(move || durable(&database)).await;
        if let Err(error) = flushed.map_err(anyhow::Error::from).flatten() {
            tracing::error!(error = format!("{error:#}"), "cannot write the database to the disk");
        }
    }
}
