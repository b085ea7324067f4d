"""Documents as people have them (.txt, .md, .html, .pdf, .docx): their paragraphs and figures."""
