"""Files as strangers may have written them: which are read, and images and names in them.

Nothing outside a folder is read because a file in it says so, nothing imported, nothing started.
"""
