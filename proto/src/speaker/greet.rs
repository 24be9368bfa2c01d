//! The exchange of headers, both directions at the same time.

use bytes::Buf;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::{ConnectError, Limits};
use crate::frame::Decoder;
use crate::handshake::{self, Feed, HeaderReader};
use crate::rpc::End;
use crate::version::{Version, VersionList};

/// The negotiated version, and a decoder that holds what came behind the header.
pub(super) async fn greet<E, R, W>(
    reader: &mut R,
    writer: &mut W,
    limits: &Limits,
) -> Result<(Version, Decoder), ConnectError>
where
    E: End,
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let ours = VersionList::current();
    let line = handshake::header_line(E::ROLE, &ours);
    let mut header = HeaderReader::default();
    let mut decoder = Decoder::new(limits.max_body);

    let write = async {
        writer.write_all(line.as_bytes()).await?;
        writer.flush().await?;
        Ok(())
    };
    let read = async {
        read_header(reader, &mut header, &mut decoder).await?;
        let expected = <E::Peer as End>::ROLE;
        Ok(handshake::validate(header.content(), expected, &ours)?)
    };
    let both = async { tokio::try_join!(write, read) };
    match timeout(handshake::TIMEOUT, both).await {
        Ok(Ok(((), version))) => Ok((version, decoder)),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(ConnectError::TimedOut { header: header.content().escape_ascii().to_string() }),
    }
}

async fn read_header<R: AsyncRead + Unpin>(
    reader: &mut R,
    header: &mut HeaderReader,
    decoder: &mut Decoder,
) -> Result<(), ConnectError> {
    loop {
        let buffer = decoder.buffer();
        if reader.read_buf(buffer).await? == 0 {
            return Err(ConnectError::Closed);
        }
        match header.feed(buffer)? {
            Feed::More => buffer.clear(),
            Feed::Done(used) => {
                buffer.advance(used);
                return Ok(());
            }
        }
    }
}
